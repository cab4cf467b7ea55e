/* A CUDA runtime without a GPU: device memory is host memory, streams and events do nothing, kernels are refused. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPointByVersion
#define OK cudaSuccess
#define TOTAL (80ull << 30)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
struct block {
  char* start;
  size_t size;
  int kind;
};
static struct block* blocks;
static int n_blocks, room;
static size_t used;

static cudaError_t take(void** out, size_t size, int kind) {
  void* p = NULL;
  pthread_mutex_lock(&lock);
  int full = kind == cudaMemoryTypeDevice && used + size > TOTAL;
  pthread_mutex_unlock(&lock);
  if (full || posix_memalign(&p, 512, size ? size : 512)) return cudaErrorMemoryAllocation;
  pthread_mutex_lock(&lock);
  if (n_blocks == room) blocks = realloc(blocks, (room = room * 2 + 64) * sizeof(*blocks));
  blocks[n_blocks++] = (struct block){p, size, kind};
  if (kind == cudaMemoryTypeDevice) used += size;
  pthread_mutex_unlock(&lock);
  *out = p;
  return OK;
}
static cudaError_t drop(void* p, int release) {
  if (!p) return OK;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_blocks; i++)
    if (blocks[i].start == p) {
      if (blocks[i].kind == cudaMemoryTypeDevice) used -= blocks[i].size;
      blocks[i] = blocks[--n_blocks];
      if (release) free(p);
      break;
    }
  pthread_mutex_unlock(&lock);
  return OK;
}
static int kind_of(const void* p) {
  int kind = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_blocks; i++)
    if ((char*)p >= blocks[i].start && (char*)p < blocks[i].start + blocks[i].size) kind = blocks[i].kind;
  pthread_mutex_unlock(&lock);
  return kind;
}
static __thread int device;
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return OK;
}
cudaError_t cudaGetDevice(int* d) {
  *d = device;
  return OK;
}
cudaError_t cudaSetDevice(int d) {
  device = d;
  return OK;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Fake H100 (host memory)");
  p->totalGlobalMem = TOTAL;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = 65536;
  p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxBlocksPerMultiProcessor = 32;
  return OK;
}
cudaError_t cudaDeviceGetAttribute(int* v, enum cudaDeviceAttr a, int d) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    default: *v = 0;
  }
  return OK;
}
cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:00:00.0");
  return OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) {
  if (a) *a = 0;
  if (b) *b = -5;
  return OK;
}
cudaError_t cudaDeviceCanAccessPeer(int* v, int a, int b) {
  *v = 1;
  return OK;
}
cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned f) { return OK; }
cudaError_t cudaDeviceSynchronize(void) { return OK; }
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return OK;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return OK;
}
cudaError_t cudaMalloc(void** p, size_t n) { return take(p, n, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void* p) { return drop(p, 1); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned f) { return take(p, n, cudaMemoryTypeHost); }
cudaError_t cudaFreeHost(void* p) { return drop(p, 1); }
cudaError_t cudaHostRegister(void* p, size_t n, unsigned f) {
  pthread_mutex_lock(&lock);
  if (n_blocks == room) blocks = realloc(blocks, (room = room * 2 + 64) * sizeof(*blocks));
  blocks[n_blocks++] = (struct block){p, n, cudaMemoryTypeHost};
  pthread_mutex_unlock(&lock);
  return OK;
}
cudaError_t cudaHostUnregister(void* p) { return drop(p, 0); }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *t = TOTAL;
  *f = TOTAL - used;
  return OK;
}
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, enum cudaMemcpyKind k) {
  memmove(d, s, n);
  return OK;
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, enum cudaMemcpyKind k, cudaStream_t q) {
  memmove(d, s, n);
  return OK;
}
cudaError_t cudaMemcpyPeerAsync(void* d, int dd, const void* s, int ss, size_t n, cudaStream_t q) {
  memmove(d, s, n);
  return OK;
}
cudaError_t cudaMemset(void* p, int v, size_t n) {
  memset(p, v, n);
  return OK;
}
cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t q) {
  memset(p, v, n);
  return OK;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  a->type = kind_of(p);
  a->device = 0;
  if (a->type) {
    a->devicePointer = (void*)p;
    a->hostPointer = (void*)p;
  }
  return OK;
}
static cudaError_t stream(cudaStream_t* s) {
  *s = (cudaStream_t)malloc(64);
  return OK;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return stream(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return stream(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) { return stream(s); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  free(s);
  return OK;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = 0;
  return OK;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { return OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return OK; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* v) {
  *v = cudaStreamCaptureStatusNone;
  return OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* v, unsigned long long* id,
                                     cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e,
                                     size_t* n) {
  *v = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* m) { return OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void* u, unsigned f) {
  c(s, OK, u);
  return OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* u) {
  f(u);
  return OK;
}
static cudaError_t event(cudaEvent_t* e) {
  *e = (cudaEvent_t)calloc(1, sizeof(struct timespec));
  return OK;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return event(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) { return event(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  free(e);
  return OK;
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return OK; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  clock_gettime(CLOCK_MONOTONIC, (struct timespec*)e);
  return OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return OK; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  struct timespec *x = (void*)a, *y = (void*)b;
  *ms = (y->tv_sec - x->tv_sec) * 1e3f + (y->tv_nsec - x->tv_nsec) * 1e-6f;
  return OK;
}
cudaError_t cudaGetLastError(void) { return OK; }
cudaError_t cudaPeekAtLastError(void) { return OK; }
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation
             ? "out of memory"
             : "refused by the fake CUDA runtime: a real kernel was launched, an operator is not replaced";
}
const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorFake";
}
cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return OK;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* n, void** p, unsigned v, unsigned long long f,
                                             enum cudaDriverEntryPointQueryResult* r) {
  *p = NULL;
  if (r) *r = cudaDriverEntryPointSymbolNotFound;
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int b, size_t m,
                                                                   unsigned fl) {
  *n = 1;
  return OK;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void* f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  return OK;
}
cudaError_t cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute a, int v) { return OK; }
