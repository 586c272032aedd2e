#include <algorithm>
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
  std::vector<RawBuffer> through;  // receives, then kept sends
  Token chain;
  void* chain_out;
  bool moved = false;  // XLA copied a receive buffer while it was being filled

  // Writes what the rest of the program reads. Error: the program is not one that can work.
  ffi::Error Finish(bool failed) {
    if (failed) {
      for (const RawBuffer& buffer : through) Poison(buffer);
      chain.failed = 1;
    }
    chain.Store(chain_out);
    if (!moved || failed) return ffi::Error::Success();
    return ffi::Error::Internal(
        "hetccl_exchange_done: XLA moved a receive buffer between start and done, so that the "
        "received data is lost; an exchange must not be carried through a loop, and done must "
        "alias its receives");
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
        "receives..., the first of the sends...)");
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
    completion->through.push_back(out);
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
  // The results behind the receives are sent buffers that pass through; wherever XLA has them, they are as sent.
  const size_t receives = exchange->receive_addresses.size();
  if (completion->through.size() < receives) completion->moved = true;
  for (size_t i = 0; i < std::min(receives, completion->through.size()); ++i) {
    if (completion->through[i].data != exchange->receive_addresses[i]) completion->moved = true;
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
