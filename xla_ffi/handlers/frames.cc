#include "xla_ffi/handlers/frames.h"

#include <initializer_list>
#include <string_view>

namespace hetccl::handlers {

namespace ffi = xla::ffi;

namespace {

ffi::Error CheckTokens(std::initializer_list<RawBuffer> tokens, std::string_view what) {
  for (const RawBuffer& token : tokens) {
    if (ffi::Error error = CheckToken(token, what); error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error ReadIdentity(const ffi::Dictionary& attributes, StartRequest* request) {
  const auto plan = Integer(attributes, "plan");
  const auto program = Integer(attributes, "program");
  const auto index = Integer(attributes, "index");
  for (const auto* value : {&plan, &program, &index}) {
    if (value->has_error()) return value->error();
  }
  request->plan = static_cast<uint64_t>(*plan);
  request->program = static_cast<uint64_t>(*program);
  request->index = static_cast<uint32_t>(*index);
  return ffi::Error::Success();
}

// Where the receives among start's `results` end and the kept sends begin.
ffi::ErrorOr<size_t> ReceivesEnd(size_t results, const ffi::Dictionary& attributes) {
  if (!attributes.contains("kept")) return results;
  const auto kept = Integer(attributes, "kept");
  if (kept.has_error()) return ffi::Unexpected(kept.error());
  if (*kept < 0 || static_cast<size_t>(*kept) > results - 2) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("hetccl_exchange_start: more results are kept than exist"));
  }
  return results - static_cast<size_t>(*kept);
}

}  // namespace

ffi::ErrorOr<StartFrame> DecodeStart(int32_t device, const ffi::RemainingArgs& args,
                                     const ffi::RemainingRets& rets,
                                     const ffi::Dictionary& attributes) {
  if (args.size() < 1 || rets.size() < 2) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "hetccl_exchange_start takes (chain, sends...) and returns (chain, ticket, receives..., "
        "kept...)"));
  }
  StartFrame frame = {Argument(args, 0), Return(rets, 0), Return(rets, 1), {}, {}};
  ffi::Error error =
      CheckTokens({frame.chain_in, frame.chain_out, frame.ticket}, "each token of start");
  if (error.success()) error = ReadIdentity(attributes, &frame.request);
  if (error.failure()) return ffi::Unexpected(error);
  const auto receives_end = ReceivesEnd(rets.size(), attributes);
  if (receives_end.has_error()) return ffi::Unexpected(receives_end.error());
  frame.request.device_ordinal = device;
  for (size_t i = 1; i < args.size(); ++i) frame.request.sends.push_back(View(Argument(args, i)));
  for (size_t i = 2; i < *receives_end; ++i) {
    frame.receives.push_back(Return(rets, i));
    frame.request.receives.push_back(View(frame.receives.back()));
  }
  return frame;
}

std::vector<const void*> DoneFrame::receive_addresses() const {
  std::vector<const void*> addresses;
  for (const RawBuffer& buffer : receives) addresses.push_back(buffer.data);
  return addresses;
}

ffi::ErrorOr<DoneFrame> DecodeDone(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  if (rets.size() < 1 || args.size() < rets.size() + 1) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "hetccl_exchange_done takes (chain, ticket, receives..., sends...) and returns (chain, "
        "receives...)"));
  }
  DoneFrame frame = {Argument(args, 0), Return(rets, 0), Argument(args, 1), {}, {}};
  const ffi::Error error =
      CheckTokens({frame.chain_in, frame.ticket, frame.chain_out}, "each token of done");
  if (error.failure()) return ffi::Unexpected(error);
  for (size_t i = 1; i < rets.size(); ++i) {
    frame.receives.push_back(Return(rets, i));
    frame.moved |= Argument(args, i + 1).data != frame.receives.back().data;
  }
  for (size_t i = rets.size() + 1; i < args.size(); ++i) {
    frame.sends.push_back(Argument(args, i).data);
  }
  return frame;
}

ffi::ErrorOr<Through> DecodeStatus(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  if (args.size() != 1 || rets.size() != 1) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("hetccl_status takes (chain) and returns (chain)"));
  }
  const Through chain = {Argument(args, 0), Return(rets, 0)};
  const ffi::Error error = CheckTokens({chain.from, chain.to}, "each token of status");
  if (error.failure()) return ffi::Unexpected(error);
  return chain;
}

}  // namespace hetccl::handlers
