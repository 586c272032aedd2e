#include "xla_ffi/exchange/matching.h"

#include <gtest/gtest.h>

namespace hetccl {
namespace {

class MatchingTest : public ::testing::Test {
 protected:
  MatchingTest() {
    head_.epoch = 1;
    head_.program = 0xA;
    head_.index = 2;
    head_.occurrence = 3;
    head_.wire_id = 4;
    head_.payload_bytes = 5;
    transport::SetText(&head_, "pmax/data i32[3]");
  }

  std::string text_ = "psum/data f32[1]";
  transport::WireHeader head_ = transport::MakeHeader(transport::MessageType::kData);
  Expected expected_ = {1, 0xA, 2, 3, 4, 5, &text_};
};

TEST_F(MatchingTest, EqualSidesMatch) { EXPECT_EQ(Judge(head_, expected_), Verdict::kMatch); }

TEST_F(MatchingTest, EveryFieldCounts) {
  const auto judge = [&](auto change) {
    Expected expected = expected_;
    change(&expected);
    return Judge(head_, expected);
  };
  EXPECT_EQ(judge([](Expected* e) { e->epoch = 9; }), Verdict::kMismatch);
  EXPECT_EQ(judge([](Expected* e) { e->index = 9; }), Verdict::kMismatch);
  EXPECT_EQ(judge([](Expected* e) { e->occurrence = 9; }), Verdict::kMismatch);
  EXPECT_EQ(judge([](Expected* e) { e->wire_id = 9; }), Verdict::kMismatch);
  EXPECT_EQ(judge([](Expected* e) { e->bytes = 9; }), Verdict::kMismatch);
  EXPECT_EQ(judge([](Expected* e) { e->program = 9; }), Verdict::kOtherProgram);
}

TEST_F(MatchingTest, TheErrorShowsBothSidesAndWhatToDo) {
  Directory directory;
  directory.SetProgram(0xA, "train_step");
  const std::string text =
      DescribeMismatch(head_, expected_, "right/0 rank 3", "left/0 rank 0", directory);
  for (const char* part :
       {"right/0 rank 3 sent pmax/data i32[3] (5 bytes, exchange #2 of program a (train_step)",
        "left/0 rank 0 expected psum/data f32[1]", "every cluster must run the same"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace hetccl
