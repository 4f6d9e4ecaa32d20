// CUDA devices for a CPU build of torch: their memory is the host's, their operations the CPU's own, and all that would
// make the host wait for a GPU is told to `on_wait`.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/profiler/stubs/base.h>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
using c10::StreamId;
constexpr auto CUDA = c10::DeviceType::CUDA;

int devices = 1;
void (*on_wait)(const char*) = nullptr;
thread_local DeviceIndex current = 0;
thread_local StreamId streams[16] = {0};
std::atomic<StreamId> last_stream{0};

void wait(const std::string& what) {
  if (on_wait) on_wait(what.c_str());
}

// --- devices, streams and events: only remembered, and when by the host's clock -----------------------------------

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex at(Device d) { return d.index() < 0 ? current : d.index(); }
  static Stream stream(Device d, StreamId id) { return Stream(Stream::UNSAFE, {CUDA, at(d)}, id); }
  c10::DeviceType type() const override { return CUDA; }
  Device getDevice() const override { return {CUDA, current}; }
  void uncheckedSetDevice(Device d) const noexcept override { current = at(d); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < devices, "CUDA error: invalid device ordinal ", int(d.index()), " of ", devices);
    current = at(d);
  }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  Stream getStream(Device d) const override { return stream(d, streams[at(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int) const override { return stream(d, ++last_stream); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream(d, ++last_stream); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    streams[s.device_index()] = s.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(*static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from)).count();
  }
  void synchronizeEvent(void*) const override { wait("event.synchronize"); }
  void synchronizeStream(const Stream&) const override { wait("stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("device.synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// --- pinned memory: the host's, remembered by address ------------------------------------------------------------

std::mutex lock;
std::map<uintptr_t, size_t> pinned;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (after == pinned.begin()) return false;
  --after;
  return reinterpret_cast<uintptr_t>(pointer) < after->first + after->second;
}

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(bytes ? bytes : 1);
    std::lock_guard<std::mutex> held(lock);
    size_t rounded = 1; // as torch's own does
    while (rounded < bytes) rounded *= 2;
    pinned[reinterpret_cast<uintptr_t>(memory)] = rounded;
    return {memory, memory, &unpin, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;
} // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

// --- operations: on views of the same memory that are the CPU's ---------------------------------------------------

namespace {
using at::Tensor;

struct Views {
  std::map<c10::StorageImpl*, c10::Storage> storages; // a device's → the host's over the same memory
  std::map<c10::StorageImpl*, c10::Storage> behind; // and back
  std::map<c10::TensorImpl*, Tensor> tensors; // a view → what it is of
  std::set<DeviceIndex> found;
  bool hosts = false; // whether there is a tensor of the host's, other than a number

  static Tensor over(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
  }
  static c10::Storage lent(const c10::Storage& storage, Device device) {
    auto* owner = new c10::Storage(storage);
    void* memory = owner->mutable_data();
    c10::DataPtr data(memory, owner, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, device);
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  }
  void keep_resized() { // what an operation has made larger: the memory is the host's new one
    for (auto& [own, host] : storages) {
      if (host.data() == own->data()) continue;
      own->set_data_ptr_noswap(lent(host, own->device()).set_data_ptr(c10::DataPtr()));
      own->set_nbytes(host.nbytes());
    }
  }
  Tensor host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      hosts |= tensor.dim() > 0;
      return tensor;
    }
    found.insert(tensor.device().index());
    auto* key = tensor.storage().unsafeGetStorageImpl();
    if (!storages.count(key)) {
      auto made = lent(tensor.storage(), c10::kCPU);
      behind.emplace(made.unsafeGetStorageImpl(), tensor.storage());
      storages.emplace(key, std::move(made));
    }
    auto view = over(storages.at(key), c10::DispatchKey::CPU, tensor);
    if (tensor.is_conj()) view._set_conj(true);
    if (tensor.is_neg()) view._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace(view.unsafeGetTensorImpl(), tensor);
    return view;
  }
  Tensor device(const Tensor& tensor, Device target) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    if (auto it = tensors.find(tensor.unsafeGetTensorImpl()); it != tensors.end()) {
      auto* impl = it->second.unsafeGetTensorImpl();
      if (it->second.sizes() != tensor.sizes())
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      return it->second;
    }
    auto it = behind.find(tensor.storage().unsafeGetStorageImpl());
    return over(it != behind.end() ? it->second : lent(tensor.storage(), target), c10::DispatchKey::CUDA, tensor);
  }
};

const std::set<std::string> COPIES{"aten::copy_", "aten::_copy_from", "aten::set_.source_Tensor"};
// A GPU's kernels take indices that are the host's, after a copy.
const std::set<std::string> INDEXED{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};
// The size of what they give depends on numbers, or the number is asked for.
const std::set<std::string> READ{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor",
    "aten::multinomial", "c10d::barrier"};

void tell_waits(const std::string& name, const c10::Stack& stack, size_t begin, const Views& views) {
  if (name == "aten::copy_") {
    const auto &to = stack[begin].toTensor(), &from = stack[begin + 1].toTensor();
    bool to_device = views.tensors.count(to.unsafeGetTensorImpl());
    bool from_device = views.tensors.count(from.unsafeGetTensorImpl());
    if (to_device == from_device || !to.numel()) return;
    if (!stack[begin + 2].toBool()) return wait(to_device ? "copy to the device" : "copy to the host");
    if (!to_device && !is_pinned(to.const_data_ptr())) wait("copy to memory of the host that is not pinned");
  } else if (READ.count(name)) {
    if (name != "aten::repeat_interleave.Tensor" || stack[begin + 1].isNone()) wait(name);
  } else if (INDEXED.count(name) && views.hosts) {
    wait(name + " by indices of the host");
  }
}

// A collective's work whose future gives the device's tensors, as DDP's reducer expects.
struct DeviceWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<Tensor> tensors;
  DeviceWork(c10::intrusive_ptr<c10d::Work> work, std::vector<Tensor> tensors)
      : work(std::move(work)), tensors(std::move(tensors)) {}
  bool isCompleted() override { return work->isCompleted(); }
  bool isSuccess() const override { return work->isSuccess(); }
  std::exception_ptr exception() const override { return work->exception(); }
  int sourceRank() const override { return work->sourceRank(); }
  std::vector<Tensor> result() override { return tensors; }
  void synchronize() override { work->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return work->wait(timeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto made = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<Device>{tensors[0].device()});
    work->getFuture()->addCallback([made, tensors = tensors](c10::ivalue::Future& done) {
      if (done.hasError()) made->setError(done.exception_ptr());
      else made->markCompleted(IValue(tensors));
    });
    return made;
  }
};

bool refusing = false; // of fake_cuda_register
thread_local bool last_error = false; // the CUDA runtime keeps a call's error until somebody asks, as each launch of torch's does

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, c10::Stack* stack) {
  TORCH_CHECK(!std::exchange(last_error, false), "CUDA error: out of memory");
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const std::string name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  Views views;
  std::optional<Device> wanted;
  for (size_t i = begin; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = views.host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(views.host(tensor));
      value = made;
    } else if (value.isList()) {
      auto list = value.toList();
      if (list.elementType()->isSubtypeOf(*c10::getTypePtr<std::optional<Tensor>>())) {
        c10::List<std::optional<Tensor>> made;
        for (const IValue& one : value.toListRef())
          made.push_back(one.isTensor() ? std::optional<Tensor>(views.host(one.toTensor())) : std::nullopt);
        value = made;
      } else if (!value.toListRef().empty() && value.toListRef()[0].isTensorList()) { // c10d's lists of lists
        c10::List<c10::List<Tensor>> made;
        for (const IValue& some : value.toListRef()) {
          c10::List<Tensor> inner;
          for (const Tensor& tensor : some.toTensorVector()) inner.push_back(views.host(tensor));
          made.push_back(inner);
        }
        value = made;
      }
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      wanted = Device(CUDA, Guard::at(value.toDevice()));
      TORCH_CHECK(wanted->index() < devices, "CUDA error: invalid device ordinal ", int(wanted->index()));
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = IValue();
    } else if (schema.arguments()[i - begin].name() == "pin_memory") {
      value = IValue();
    }
  }
  if (schema.name().rfind("aten::", 0) == 0 && !COPIES.count(name)) {
    TORCH_CHECK(views.found.size() <= 1, "Expected all tensors to be on the same device, but ", name, " got several");
    TORCH_CHECK(!views.hosts || views.found.empty() || INDEXED.count(name),
        "Expected all tensors to be on the same device, but ", name, " got cuda and cpu");
  }
  tell_waits(name, *stack, begin, views);
  const Device target = wanted.value_or(Device(CUDA, views.found.empty() ? current : *views.found.begin()));
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  views.keep_resized();
  std::vector<Tensor> given;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = views.device(value.toTensor(), target);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(views.device(tensor, target));
      given = made.vec();
      value = made;
    } else if (name == "c10d::allreduce_") {
      c10::intrusive_ptr<c10d::Work> work = c10::make_intrusive<DeviceWork>(value.toCustomClass<c10d::Work>(), given);
      value = IValue(work);
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// What torch computes for every device by one function, which calls a kernel that only its CUDA build has.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("record_stream", [](Tensor&, Stream) {});
}

// Collectives of a device's tensors are those of the host's, over the same process group: gloo.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier",
        "send", "recv_", "recv_any_source_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// DDP's reducer wants one for its devices.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

// torch.profiler wants events around each operation of its devices. That it waits for them is no step's wait.
struct NoEvents final : torch::profiler::impl::ProfilerStubs {
  void record(DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub*, int64_t*) const override {
    if (device) *device = current;
  }
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  float elapsed(const Event*, const Event*) const override { return 1.0f; }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> work) const override {
    for (int device = 0; device < devices; ++device) work(device);
  }
  void synchronize() const override {}
};
NoEvents no_events;
} // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}

extern "C" {
void fake_cuda_begin(int count, void (*callback)(const char*)) {
  devices = count;
  on_wait = callback;
  torch::profiler::impl::registerCUDAMethods(&no_events);
}
void fake_cuda_resize(void* storage, size_t bytes) { // c10::StorageImpl: torch's own way is in its CUDA build alone
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  auto made = c10::GetCPUAllocator()->allocate(bytes);
  if (impl->nbytes() && bytes) std::memcpy(made.get(), impl->data(), std::min(bytes, impl->nbytes()));
  auto* owner = new c10::DataPtr(std::move(made));
  c10::DataPtr data(owner->get(), owner, [](void* kept) { delete static_cast<c10::DataPtr*>(kept); }, impl->device());
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}
void fake_cuda_refuse(int refused) { refusing = refused != 0; }
int fake_cuda_register(void* memory, size_t bytes) { // cudaHostRegister
  if (refusing) {
    last_error = true;
    return 2;
  }
  std::lock_guard<std::mutex> held(lock);
  pinned[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return 0;
}
int fake_cuda_unregister(void* memory) {
  std::lock_guard<std::mutex> held(lock);
  return pinned.erase(reinterpret_cast<uintptr_t>(memory)) ? 0 : 1;
}
size_t fake_cuda_pinned() {
  std::lock_guard<std::mutex> held(lock);
  size_t total = 0;
  for (const auto& [_, bytes] : pinned) total += bytes;
  return total;
}
}
