#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/handlers/buffers.h"
#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/handlers.h"
#include "xla_ffi/handlers/token.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

namespace {

// What the completion needs after the handler has returned.
struct Completion {
  std::vector<RawBuffer> buffers;     // the receives
  std::vector<const void*> receives;  // where done sees them
  std::vector<const void*> sends;
  Token chain;
  void* chain_out;
  bool moved = false;  // XLA copied a buffer while it was being filled or sent

  // Writes what the rest of the program reads. Error: the program is not one that can work.
  ffi::Error Finish(bool failed) {
    if (failed) {
      for (const RawBuffer& buffer : buffers) Poison(buffer);
      chain.failed = 1;
    }
    chain.Store(chain_out);
    if (!moved || failed) return ffi::Error::Success();
    return ffi::Error::Internal(
        "hetccl_exchange_done: XLA moved a buffer between start and done, so that what was sent "
        "or received may be lost; an exchange must not be carried through a loop, done must alias "
        "its receives, and its sends must be those of start");
  }
};

ffi::Future Resolved(const ffi::Error& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  if (error.success()) {
    promise.SetAvailable();
  } else {
    promise.SetError(error);
  }
  return future;
}

// Reads the frame; an error if it is malformed.
ffi::Error Decode(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  Completion* completion, Token* ticket) {
  if (rets.size() < 1 || args.size() < rets.size() + 1) {
    return ffi::Error::InvalidArgument(
        "hetccl_exchange_done takes (chain, ticket, receives..., sends...) and returns (chain, "
        "receives...)");
  }
  const RawBuffer chain_in = Argument(args, 0);
  const RawBuffer ticket_in = Argument(args, 1);
  const RawBuffer chain_out = Return(rets, 0);
  for (const RawBuffer& token : {chain_in, ticket_in, chain_out}) {
    if (ffi::Error error = CheckToken(token, "each token of done"); error.failure()) return error;
  }
  completion->chain = Token::Load(chain_in.data);
  completion->chain_out = chain_out.data;
  *ticket = Token::Load(ticket_in.data);
  for (size_t i = 1; i < rets.size(); ++i) {
    const RawBuffer in = Argument(args, i + 1);
    const RawBuffer out = Return(rets, i);
    if (in.data != out.data) completion->moved = true;
    completion->buffers.push_back(out);
    completion->receives.push_back(out.data);
  }
  for (size_t i = rets.size() + 1; i < args.size(); ++i) {
    completion->sends.push_back(Argument(args, i).data);
  }
  return ffi::Error::Success();
}

}  // namespace

static ffi::Future Done(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  auto completion = std::make_shared<Completion>();
  Token ticket;
  if (ffi::Error error = Decode(args, rets, completion.get(), &ticket); error.failure()) {
    return Resolved(error);
  }
  if (ticket.id() == 0) return Resolved(completion->Finish(/*failed=*/true));
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Resolved(NoEngine("hetccl_exchange_done"));
  const std::shared_ptr<Exchange> exchange = engine->Take(ticket.id());
  if (exchange == nullptr) {
    return Resolved(ffi::Error::Internal(
        "hetccl_exchange_done: unknown exchange; its ticket was used twice, or the world that "
        "started it was shut down"));
  }
  if (completion->receives != exchange->receive_addresses ||
      completion->sends != exchange->send_addresses) {
    completion->moved = true;
  }
  if (completion->moved) engine->CountCopied();

  ffi::Promise promise;
  ffi::Future future(promise);
  bool failed = false;
  const bool complete = exchange->Await(
      [completion, promise](bool exchange_failed) mutable {
        ffi::Error error = completion->Finish(exchange_failed);
        completion.reset();
        // Runs the rest of this device's program before it returns.
        if (error.success()) {
          promise.SetAvailable();
        } else {
          promise.SetError(std::move(error));
        }
      },
      &failed);
  if (!complete) return future;
  return Resolved(completion->Finish(failed));
}

}  // namespace hetccl::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(HetcclExchangeDone, hetccl::handlers::Done,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
