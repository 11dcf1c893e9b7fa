// An accelerator that is the CPU in disguise (torch's PrivateUse1 backend): its tensors lie in host memory, its operators
// are the CPU's, and what CUDA would refuse is refused: tensors of two devices in one operator, CPU generators for
// device tensors, integer matrix products. Memory that nobody has written is NaN. Counted are the operators, the copies
// in either direction, and the other places at which the host would wait for a device. Not emulated: CUDA's rounding,
// streams, memory that runs out.
// Not torch/extension.h, which would take the compiler as long again.
#include <torch/csrc/python_headers.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <unordered_set>

#include "without_device_check.h"  // WITHOUT_DEVICE_CHECK: operators that take CPU scalars beside device tensors

namespace {
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
using Names = const std::unordered_set<std::string>;

std::atomic<int64_t> operators{0}, waits{0}, to_device{0}, to_host{0};
thread_local int inside = 0;  // an operator: copies that it makes are no transfers of the program
struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};
pybind11::object* watcher = nullptr;  // called with the kind of each copy and wait, and how many numbers it is of
void count(std::atomic<int64_t>& what, const char* kind = nullptr, int64_t numbers = 1) {
  if (inside) return;
  what++;
  if (!kind || !watcher) return;
  pybind11::gil_scoped_acquire held;
  (*watcher)(kind, numbers);
}

// ---- memory, device, random numbers

void release(void* pointer) { c10::free_cpu(pointer); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (bytes) memset(pointer, 0xFF, bytes);
    return {pointer, pointer, &release, c10::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  c10::Stream stream() const noexcept { return c10::Stream(c10::Stream::DEFAULT, c10::Device(DEVICE, 0)); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() : at::CPUGeneratorImpl(0) {
    device_ = c10::Device(DEVICE, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<Generator>();
    return generator;
  }
  c10::Device getDeviceFromPtr(void*) const override { return {DEVICE, 0}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto pointer = allocator.allocate(bytes);
    memcpy(pointer.get(), storage.data(), std::min(bytes, storage.nbytes()));
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(pointer));
    const_cast<c10::Storage&>(storage).set_nbytes(bytes);
  }
};
Hooks hooks;

// ---- tensors

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return self;
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, source, 0, c10::SymIntArrayRef({c10::SymInt(length)}), {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

// The same memory as a CPU tensor.
at::Tensor disguise_off(const at::Tensor& self) {
  if (self.device().is_cpu()) return self;
  c10::Storage storage(c10::Storage::use_byte_size_t(), self.storage().nbytes(),
                       c10::DataPtr(self.storage().mutable_data(), c10::Device(c10::kCPU)), nullptr, false);
  auto plain = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), self.dtype());
  plain.unsafeGetTensorImpl()->set_sizes_and_strides(self.sizes(), self.strides(), self.storage_offset());
  if (self.is_conj()) plain._set_conj(true);
  if (self.is_neg()) plain._set_neg(true);
  return plain;
}
std::optional<at::Tensor> disguise_off(const std::optional<at::Tensor>& self) {
  return self && self->defined() ? std::optional<at::Tensor>(disguise_off(*self)) : std::nullopt;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  count(operators);
  if (self.device().is_cpu() && !to.device().is_cpu()) count(to_device, "to_device", self.numel());
  if (!self.device().is_cpu() && to.device().is_cpu()) count(to_host, "to_host", self.numel());
  auto plain = disguise_off(to);
  at::AutoDispatchBelowADInplaceOrView guard;
  plain.copy_(disguise_off(self), false);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.resize_(self.sizes());
  }
  return copy_from(self, to, false);
}
at::Scalar item(const at::Tensor& self) {
  count(waits, "waits");
  at::AutoDispatchBelowADInplaceOrView guard;
  return disguise_off(self).item();
}

// ---- operators

// Their results' sizes depend on values, which the host must wait for.
Names WAITING = {"aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
                 "aten::_unique2", "aten::_unique", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
                 "aten::repeat_interleave.Tensor", "aten::equal", "aten::histc", "aten::multinomial"};
Names INDEXING = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_",
                  "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};
Names PRODUCTS = {"aten::mm", "aten::mm.out", "aten::bmm", "aten::bmm.out", "aten::mv", "aten::mv.out", "aten::dot"};
Names ABSENT = {"aten::histogram.bins_tensor", "aten::histogram.bin_ct", "aten::_histogramdd_from_bin_cts"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  auto actual = torch::jit::last(stack, formal.size());
  std::string name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  const bool indexing = INDEXING.count(name);
  bool on_device = false, cpu_generator = false, waiting = WAITING.count(name), integers = false;
  std::vector<std::pair<const c10::Argument*, at::Tensor>> strangers;
  auto look = [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) {
      on_device = true;
      waiting |= indexing && argument.name() == "indices" && tensor.scalar_type() == at::kBool;
      integers |= c10::isIntegralType(tensor.scalar_type(), true);
    } else {
      strangers.emplace_back(&argument, tensor);
    }
  };
  for (size_t i = 0; i < formal.size(); i++) {
    const auto& value = actual[i];
    if (value.isTensor()) look(value.toTensor(), formal[i]);
    else if (value.isGenerator()) cpu_generator |= value.toGenerator().device().is_cpu();
    else if (value.isDevice()) on_device |= value.toDevice().type() == DEVICE;
    else if (value.isList())
      for (const auto& each : value.toListRef())
        if (each.isTensor()) look(each.toTensor(), formal[i]);
  }
  if (on_device) {
    TORCH_CHECK(!cpu_generator, "Expected a 'device' type for generator but found 'cpu' in ", name);
    TORCH_CHECK(!ABSENT.count(name), "Could not run '", name, "' on the device");
    TORCH_CHECK(!integers || !PRODUCTS.count(name), name, " not implemented for integers");
    for (const auto& [argument, tensor] : strangers) {
      const bool scalar = tensor.dim() == 0 && !(argument->alias_info() && argument->alias_info()->isWrite());
      const bool allowed = indexing ? argument->name() == "indices" || (argument->name() == "values" && scalar)
                                    : WITHOUT_DEVICE_CHECK.count(name) && scalar;
      TORCH_CHECK(allowed, "Expected all tensors to be on the same device, but argument ", argument->name(), " of ",
                  name, " is on cpu and others are on the device");
      if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) count(to_device, "to_device");
    }
  }
  count(operators);
  if (waiting) count(waits, "waits");
  Inside operator_;
  // The CPU's operators want the CPU's generators: one with the same state stands in.
  std::optional<at::Generator> ours, standing_in;
  for (size_t i = 0; i < formal.size(); i++) {
    if (!actual[i].isGenerator() || actual[i].toGenerator().device().is_cpu()) continue;
    ours = actual[i].toGenerator();
    standing_in = at::make_generator<at::CPUGeneratorImpl>();
    standing_in->set_state(ours->get_state());
    (*stack)[stack->size() - formal.size() + i] = *standing_in;
  }
  at::native::cpu_fallback(op, stack, true);
  if (ours) ours->set_state(standing_in->get_state());
}

at::Tensor disguise_on(const at::Tensor& self) { return self.defined() ? self.to(c10::Device(DEVICE, 0)) : self; }
void same_device(std::initializer_list<at::Tensor> tensors) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(!tensor.defined() || tensor.is_privateuseone(), "Expected all tensors to be on the same device");
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  same_device({x, w, b.value_or(at::Tensor())});
  count(operators);
  Inside operator_;
  at::AutoDispatchBelowADInplaceOrView guard;
  return disguise_on(at::convolution_symint(disguise_off(x), disguise_off(w), disguise_off(b), stride, padding,
                                            dilation, transposed, output_padding, groups));
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  same_device({gradient, x, w});
  count(operators);
  Inside operator_;
  at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<c10::SymInt> biases{transposed ? w.sym_size(1) * groups : w.sym_size(0)};
  auto [gx, gw, gb] = at::convolution_backward_symint(
      disguise_off(gradient), disguise_off(x), disguise_off(w), c10::OptionalArrayRef<c10::SymInt>(biases), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  return {disguise_on(gx), disguise_on(gw), disguise_on(gb)};
}
// The schema does not say that it writes the running statistics: the fallback would lose that.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  same_device({x, w.value_or(at::Tensor()), b.value_or(at::Tensor()), mean.value_or(at::Tensor()),
               variance.value_or(at::Tensor())});
  count(operators);
  Inside operator_;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto [out, m, s] = at::native_batch_norm(disguise_off(x), disguise_off(w), disguise_off(b), disguise_off(mean),
                                           disguise_off(variance), training, momentum, eps);
  return {disguise_on(out), disguise_on(m), disguise_on(s)};
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("watch", [](pybind11::object function) {
    delete watcher;
    watcher = function.is_none() ? nullptr : new pybind11::object(function);
  });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"operators", operators}, {"waits", waits}, {"to_device", to_device}, {"to_host", to_host}};
  });
}
