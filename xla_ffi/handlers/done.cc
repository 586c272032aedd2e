#include <memory>
#include <utility>

#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/frames.h"
#include "xla_ffi/handlers/handlers.h"
#include "xla_ffi/handlers/token.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

namespace {

// What the completion needs after the handler has returned.
struct Completion {
  DoneFrame frame;  // moved: XLA copied a buffer while it was being filled or sent
  Token chain = Token::Load(frame.chain_in.data);

  explicit Completion(DoneFrame decoded) : frame(std::move(decoded)) {}

  // Writes what the rest of the program reads. Error: the program is not one that can work.
  ffi::Error Finish(bool failed) {
    if (failed) {
      for (const RawBuffer& buffer : frame.receives) Poison(buffer);
      chain.failed = 1;
    }
    chain.Store(frame.chain_out.data);
    if (!frame.moved || failed) return ffi::Error::Success();
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

}  // namespace

static ffi::Future Done(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  auto frame = DecodeDone(args, rets);
  if (frame.has_error()) return Resolved(frame.error());
  const Token ticket = Token::Load(frame->ticket.data);
  auto completion = std::make_shared<Completion>(std::move(*frame));
  if (ticket.id() == 0) return Resolved(completion->Finish(/*failed=*/true));
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Resolved(NoEngine("hetccl_exchange_done"));
  const std::shared_ptr<Exchange> exchange = engine->Take(ticket.id());
  if (exchange == nullptr) {
    return Resolved(ffi::Error::Internal(
        "hetccl_exchange_done: unknown exchange; its ticket was used twice, or the world that "
        "started it was shut down"));
  }
  if (completion->frame.receive_addresses() != exchange->receive_addresses ||
      completion->frame.sends != exchange->send_addresses) {
    completion->frame.moved = true;
  }
  if (completion->frame.moved) engine->CountCopied();

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
