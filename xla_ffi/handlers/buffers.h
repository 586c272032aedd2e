// Reading a call frame: buffers, attributes, errors. The only place where Status becomes
// ffi::Error.
#ifndef XLA_FFI_HANDLERS_BUFFERS_H_
#define XLA_FFI_HANDLERS_BUFFERS_H_

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/fill.h"
#include "xla_ffi/exchange/plan.h"

namespace hetccl::handlers {

// What outlives the handler: ffi::Buffer itself points into a pooled call frame.
struct RawBuffer {
  std::byte* data;
  size_t bytes;
  xla::ffi::DataType dtype;
};

RawBuffer Argument(const xla::ffi::RemainingArgs& args, size_t index);
RawBuffer Return(const xla::ffi::RemainingRets& rets, size_t index);
inline BufferView View(const RawBuffer& buffer) { return {buffer.data, buffer.bytes}; }

// An error that says what a well-formed call looks like, unless the buffer is a u32[4].
xla::ffi::Error CheckToken(const RawBuffer& buffer, std::string_view what);

// An integer attribute, however the caller spelled its width; an error that names it if missing.
xla::ffi::ErrorOr<int64_t> Integer(const xla::ffi::Dictionary& attributes, std::string_view name);

xla::ffi::Error ToError(const Status& status);
xla::ffi::Error NoEngine(std::string_view handler);

// What poisons buffers of this type: NaN, or zeros (an empty pattern) where the type has none.
device::Pattern PoisonOf(xla::ffi::DataType dtype);

// Fills the buffer with NaN of its type, or zero where the type has none.
void Poison(const RawBuffer& buffer);

}  // namespace hetccl::handlers

#endif  // XLA_FFI_HANDLERS_BUFFERS_H_
