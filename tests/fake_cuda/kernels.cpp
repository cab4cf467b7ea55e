// Each CUDA kernel of ATen is replaced: check the devices as CUDA does, run the CPU kernel on the same memory, give
// CUDA tensors back.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>
#include <atomic>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

using c10::IValue;
using torch::jit::Stack;

namespace {
std::unordered_set<std::string> unchecked, syncs, nondeterministic, no_integers, cublas;
std::unordered_map<std::string, int64_t> counts;
std::mutex mutex;

// the memory of a CUDA tensor, as a CPU tensor
at::Tensor host_view(const at::Tensor& t) {
  if (t.layout() == at::kSparseCsr)
    return at::_sparse_csr_tensor_unsafe(host_view(t.crow_indices()), host_view(t.col_indices()), host_view(t.values()),
                                         t.sizes(), t.options().device(at::kCPU));
  auto storage = t.storage();
  void* p = t.storage().nbytes() ? const_cast<void*>(storage.data()) : nullptr;
  auto data =
      c10::DataPtr(p, new c10::Storage(storage), [](void* c) { delete static_cast<c10::Storage*>(c); }, at::kCPU);
  c10::Storage s(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  at::Tensor out(std::move(impl));
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

void copy_memory(const at::Tensor& cpu, at::Tensor& cuda) {
  if (cpu.numel()) host_view(cuda).copy_(cpu);
}

at::Tensor to_cuda(const at::Tensor& cpu, c10::Device device) {
  if (cpu.layout() != at::kStrided) TORCH_CHECK_NOT_IMPLEMENTED(false, "fake cuda: a result that is not strided");
  auto out = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device));
  if (cpu.is_conj()) out._set_conj(true);
  if (cpu.is_neg()) out._set_neg(true);
  copy_memory(cpu, out);
  return out;
}

at::Generator cpu_generator(const at::Generator& cuda) {  // follows the state of the CUDA generator
  auto g = cuda;
  std::lock_guard<std::mutex> hold(g.mutex());
  uint64_t offset = g.get_offset(), seed = g.current_seed();
  g.set_offset(offset + 4);
  return at::detail::createCPUGenerator(seed * 6364136223846793005ull + offset * 1442695040888963407ull + 1);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& base = schema.name();
  const auto& arguments = schema.arguments();
  size_t n = arguments.size();
  auto begin = stack->end() - n;
  std::vector<IValue> original(begin, stack->end());
  c10::optional<c10::Device> device, devarg;
  bool has_cpu_dim = false, has_cpu_scalar = false, cpu_written = false, wide_integer = false, csr = false,
       first = true, first_cpu = false;
  std::string where;
  auto look = [&](const at::Tensor& t, const c10::Argument& a) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (!device) device = t.device();
      else
        TORCH_CHECK(device == t.device() || base == "aten::copy_",
                    "Expected all tensors to be on the same device, but found ", *device, " and ", t.device(), " (",
                    base, ")");
      TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided || t.layout() == at::kSparseCsr,
                                  "fake cuda: sparse tensors are not there (", base, ")");
      csr |= t.layout() == at::kSparseCsr;
      wide_integer |= at::isIntegralType(t.scalar_type(), true);
    } else if (t.is_cpu()) {
      if (first) first_cpu = true;
      if (t.dim() > 0) {
        has_cpu_dim = true;
        where = a.name();
      } else {
        has_cpu_scalar = true;
        if (where.empty()) where = a.name();
      }
      if (a.alias_info() && a.alias_info()->isWrite()) {
        cpu_written = true;
        where = a.name();
      }
    }
    first = false;
  };
  for (size_t i = 0; i < n; i++) {
    const auto& v = original[i];
    const auto& a = arguments[i];
    if (v.isTensor()) look(v.toTensor(), a);
    else if (v.isTensorList())
      for (const auto& t : v.toTensorVector()) look(t, a);
    else if (v.isList()) {
      for (const IValue& t : v.toListRef())
        if (t.isTensor()) look(t.toTensor(), a);
    } else if (v.isDevice()) devarg = v.toDevice();
  }
  bool copies = base == "aten::copy_" || base == "aten::_foreach_copy_" || base == "aten::_copy_from";
  bool indexed = base.rfind("aten::index_put", 0) == 0 || base == "aten::index" ||
                 base.rfind("aten::_index_put", 0) == 0 || base == "aten::_unsafe_index" ||
                 base == "aten::_unsafe_index_put";
  if (device) {
    const char* message = "Expected all tensors to be on the same device, but found at least two devices, ";
    if (copies) {
    } else if (indexed) {
      TORCH_CHECK(!first_cpu, "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    } else if (!unchecked.count(base) && !unchecked.count(base + "." + schema.overload_name())) {
      TORCH_CHECK(!has_cpu_dim && !has_cpu_scalar, message, *device, " and cpu! (when checking argument for argument ",
                  where, " in method ", base, ")");
    } else {
      TORCH_CHECK(!has_cpu_dim && !cpu_written, message, *device, " and cpu! (argument ", where, " of ", base, ")");
    }
    if (wide_integer && no_integers.count(base) && original[0].isTensor() &&
        at::isIntegralType(original[0].toTensor().scalar_type(), true))
      TORCH_CHECK_NOT_IMPLEMENTED(false, "\"", base, "_cuda\" not implemented for '",
                                  original[0].toTensor().scalar_type(), "'");
    if (at::globalContext().deterministicAlgorithms()) {
      if (nondeterministic.count(base)) at::globalContext().alertNotDeterministic(base + "_cuda");
      const char* config = getenv("CUBLAS_WORKSPACE_CONFIG");
      TORCH_CHECK(!cublas.count(base) || (config && (!strcmp(config, ":4096:8") || !strcmp(config, ":16:8"))),
                  "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
                  "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
                  "uses CuBLAS and you have CUDA >= 10.2 (CUBLAS_WORKSPACE_CONFIG is not set)");
    }
  }
  if (!device) device = devarg && devarg->is_cuda() ? *devarg : c10::Device(at::kCUDA, 0);
  if (device->index() < 0) device = c10::Device(at::kCUDA, 0);
  bool sync = syncs.count(base) ||
              (base == "aten::copy_" && (original[0].toTensor().is_cpu() != original[1].toTensor().is_cpu()));
  {
    std::lock_guard<std::mutex> hold(mutex);
    counts[base]++;
    counts["total"]++;
    if (sync) counts["sync"]++;
  }
  // generators: CUDA asks for one of its own kind
  for (size_t i = 0; i < n; i++) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos) continue;
    auto& v = *(stack->end() - n + i);
    if (!original[i].isNone()) {
      auto g = original[i].toGenerator();
      TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", g.device().type(),
                  "'");
      v = IValue(cpu_generator(g));
    } else {
      v = IValue(cpu_generator(at::globalContext().defaultGenerator(c10::Device(at::kCUDA, device->index()))));
    }
  }
  std::unordered_map<const c10::TensorImpl*, at::Tensor> seen;  // the same tensor twice is the same alias twice
  auto swap = [&](const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    auto& a = seen[t.unsafeGetTensorImpl()];
    if (!a.defined()) a = host_view(t);
    return a;
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = *(stack->end() - n + i);
    const auto& o = original[i];
    if (o.isTensor()) v = IValue(swap(o.toTensor()));
    else if (o.isTensorList()) {
      std::vector<at::Tensor> ts;
      for (const auto& t : o.toTensorVector()) ts.push_back(swap(t));
      v = IValue(ts);
    } else if (o.isList()) {
      auto list = o.toList();
      auto out = c10::impl::GenericList(list.elementType());
      for (size_t k = 0; k < list.size(); k++) {
        IValue e = list.get(k);
        if (e.isTensor()) e = IValue(swap(e.toTensor()));
        out.push_back(e);
      }
      v = IValue(out);
    } else if (o.isDevice()) v = IValue(c10::Device(at::kCPU));
  }
  std::vector<IValue> inputs(stack->end() - n, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(csr ? c10::DispatchKey::SparseCsrCPU : c10::DispatchKey::CPU), stack);

  // outputs written into arguments: grown ones are given back
  auto finish = [&](const at::Tensor& cuda, const at::Tensor& cpu) {
    if (!cuda.defined() || !cuda.is_cuda()) return;
    if (cpu.data_ptr() == cuda.data_ptr() && cpu.sizes() == cuda.sizes() && cpu.strides() == cuda.strides()) return;
    at::Tensor c = cuda;
    if (cpu.sizes() != c.sizes()) c.resize_(cpu.sizes());
    if (cpu.strides() != c.strides() && cpu.is_non_overlapping_and_dense())
      c.as_strided_(cpu.sizes(), cpu.strides(), c.storage_offset());
    if (cpu.data_ptr() != c.data_ptr()) copy_memory(cpu, c);
  };
  for (size_t i = 0; i < n; i++) {
    if (!arguments[i].alias_info() || !arguments[i].alias_info()->isWrite()) continue;
    if (original[i].isTensor()) finish(original[i].toTensor(), inputs[i].toTensor());
    else if (original[i].isTensorList()) {
      auto a = original[i].toTensorVector(), b = inputs[i].toTensorVector();
      for (size_t k = 0; k < a.size(); k++) finish(a[k], b[k]);
    }
  }
  const auto& returns = schema.returns();
  size_t m = returns.size();
  auto give = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined() || t.is_cuda()) return t;
    for (const auto& pair : seen)
      if (pair.second.is_same(t)) {
        for (size_t i = 0; i < n; i++) {
          if (original[i].isTensor() && original[i].toTensor().unsafeGetTensorImpl() == pair.first)
            return original[i].toTensor();
          if (original[i].isTensorList())
            for (const auto& x : original[i].toTensorVector())
              if (x.unsafeGetTensorImpl() == pair.first) return x;
        }
      }
    if (base == "aten::copy_") return original[0].toTensor();
    return to_cuda(t, *device);
  };
  for (size_t i = 0; i < m; i++) {
    auto& v = *(stack->end() - m + i);
    if (v.isTensor()) v = IValue(give(v.toTensor()));
    else if (v.isTensorList()) {
      std::vector<at::Tensor> ts;
      for (const auto& t : v.toTensorVector()) ts.push_back(give(t));
      v = IValue(ts);
    }
  }
}

std::vector<c10::RegistrationHandleRAII>& handles() {
  static auto* h = new std::vector<c10::RegistrationHandleRAII>;
  return *h;
}

void split(const char* text, std::unordered_set<std::string>& into) {
  std::istringstream s(text);
  std::string w;
  while (s >> w) into.insert(w);
}
}  // namespace

extern "C" {
int fake_cuda_register(const char* keep_text, const char* extra_text, const char* unchecked_text, const char* sync_text,
                       const char* nondeterministic_text, const char* no_integers_text, const char* cublas_text) {
  std::unordered_set<std::string> keep, extra;
  split(keep_text, keep);
  split(extra_text, extra);
  split(unchecked_text, unchecked);
  split(sync_text, syncs);
  split(nondeterministic_text, nondeterministic);
  split(no_integers_text, no_integers);
  split(cublas_text, cublas);
  auto& dispatcher = c10::Dispatcher::singleton();
  int done = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 && name.name.rfind("torchvision::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op) continue;
    std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (!(op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || extra.count(full))) continue;
    static const std::unordered_set<std::string> sparse{
        "aten::mm",     "aten::mm.out",         "aten::addmm", "aten::addmm.out", "aten::mv",
        "aten::mv.out", "aten::_sparse_csr_mm", "aten::addmv", "aten::addmv.out", "aten::bmm.out"};
    if (sparse.count(full) && op->hasKernelForDispatchKey(c10::DispatchKey::SparseCsrCUDA))
      handles().push_back(dispatcher.registerImpl(name, c10::DispatchKey::SparseCsrCUDA,
                                                  c10::KernelFunction::makeFromBoxedFunction<&fallback>(), {}, nullptr,
                                                  "fake cuda"));
    if (keep.count(full) || keep.count(name.name)) continue;
    bool view = false;
    for (const auto& r : op->schema().returns())
      if (r.alias_info() && !r.alias_info()->isWrite()) view = true;
    if (view) continue;
    handles().push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                                c10::KernelFunction::makeFromBoxedFunction<&fallback>(), {}, nullptr,
                                                "fake cuda"));
    done++;
  }
  return done;
}
const char* fake_cuda_counts() {
  static std::string text;
  std::lock_guard<std::mutex> hold(mutex);
  text.clear();
  for (auto& c : counts) text += c.first + " " + std::to_string(c.second) + "\n";
  return text.c_str();
}
}
