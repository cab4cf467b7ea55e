/* libcuda.so.1 without a driver: it says that it is there, and refuses all work. */
#define REFUSE(name) \
  int name(void) { return 801; }
REFUSE(cuCtxSetCurrent)
REFUSE(cuDeviceGet)
REFUSE(cuDeviceGetAttribute)
REFUSE(cuDevicePrimaryCtxRetain)
REFUSE(cuFuncGetAttribute)
REFUSE(cuFuncSetAttribute)
REFUSE(cuFuncSetCacheConfig)
REFUSE(cuLaunchCooperativeKernel)
REFUSE(cuLaunchKernel)
REFUSE(cuLinkAddData_v2)
REFUSE(cuLinkComplete)
REFUSE(cuLinkCreate_v2)
REFUSE(cuModuleGetFunction)
REFUSE(cuModuleLoad)
REFUSE(cuModuleLoadData)
REFUSE(cuModuleLoadDataEx)
REFUSE(cuModuleUnload)
REFUSE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSE(cuPointerGetAttribute)
REFUSE(cuTensorMapEncodeTiled)
int cuDevicePrimaryCtxGetState(int d, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int e, const char** s) {
  *s = "fake cuda driver";
  return 0;
}
int cuCtxGetCurrent(void** c) {
  *c = (void*)1;
  return 0;
}
