#include "xla_ffi/handlers/buffers.h"

#include <cstring>
#include <string>

#include "xla_ffi/device/fill.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

device::Pattern PoisonOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F16:
      return {{0x00, 0x7E}, 2};
    case ffi::DataType::BF16:
      return {{0xC0, 0x7F}, 2};
    case ffi::DataType::F32:
    case ffi::DataType::C64:
      return {{0x00, 0x00, 0xC0, 0x7F}, 4};
    case ffi::DataType::F64:
    case ffi::DataType::C128:
      return {{0, 0, 0, 0, 0, 0, 0xF8, 0x7F}, 8};
    case ffi::DataType::F8E5M2:
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3FN:
      return {{0x7F}, 1};
    case ffi::DataType::F8E3M4:
      return {{0x78}, 1};
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
      return {{0x80}, 1};
    case ffi::DataType::F8E8M0FNU:
      return {{0xFF}, 1};
    default:
      return {{0}, 0};
  }
}

RawBuffer Argument(const ffi::RemainingArgs& args, size_t index) {
  const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(index);
  return {static_cast<std::byte*>(buffer.untyped_data()), buffer.size_bytes(),
          buffer.element_type()};
}

RawBuffer Return(const ffi::RemainingRets& rets, size_t index) {
  ffi::Result<ffi::AnyBuffer> buffer = *rets.get<ffi::AnyBuffer>(index);
  return {static_cast<std::byte*>(buffer->untyped_data()), buffer->size_bytes(),
          buffer->element_type()};
}

ffi::Error CheckToken(const RawBuffer& buffer, std::string_view what) {
  if (buffer.dtype == ffi::DataType::U32 && buffer.bytes == 16) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("hetccl: " + std::string(what) + " must be a u32[4]");
}

ffi::ErrorOr<int64_t> Integer(const ffi::Dictionary& attributes, std::string_view name) {
  if (auto value = attributes.get<int64_t>(name); value.has_value()) return *value;
  if (auto value = attributes.get<uint64_t>(name); value.has_value()) {
    return static_cast<int64_t>(*value);
  }
  if (auto value = attributes.get<int32_t>(name); value.has_value()) return int64_t{*value};
  return ffi::Unexpected(
      ffi::Error::InvalidArgument("hetccl: missing integer attribute " + std::string(name)));
}

ffi::Error ToError(const Status& status) {
  const std::string text =
      std::string("hetccl ") + KindName(status.kind()) + ": " + status.message();
  switch (status.kind()) {
    case ErrorKind::kTimeout:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
    case ErrorKind::kPeerLost:
      return ffi::Error(ffi::ErrorCode::kUnavailable, text);
    case ErrorKind::kInternal:
      return ffi::Error(ffi::ErrorCode::kInternal, text);
    default:
      return ffi::Error(ffi::ErrorCode::kAborted, text);
  }
}

ffi::Error NoEngine(std::string_view handler) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    std::string(handler) +
                        ": this process is in no world; call jax_hetccl.initialize() first, and "
                        "do not run programs after jax_hetccl.shutdown()");
}

void Poison(const RawBuffer& buffer) {
  if (buffer.bytes == 0) return;
  const device::Pattern nan = PoisonOf(buffer.dtype);
  if (nan.size == 0) {
    std::memset(buffer.data, 0, buffer.bytes);
  } else {
    device::FillPattern(buffer.data, buffer.bytes, nan.bytes, nan.size);
  }
}

}  // namespace hetccl::handlers
