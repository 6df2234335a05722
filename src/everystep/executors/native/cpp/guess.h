// The work that most likely follows another: every row feeds the best token that was reported of it.
//
// So threads can begin with it before anybody has looked at the results. Whoever then asks for just
// this, or for some of its rows, gets what was found; a result depends on its row alone, so the
// bits are those of a step that was asked for. What the guess writes lies beyond what rows hold, in
// pages that are theirs alone; it is kept apart from the caller's memory but for the tables of ropes.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace everystep {

class Guess {
  public:
    // Whether the results of a work say what each of its rows most likely feeds next.
    static bool follows(const Work& work);

    // Whether guesses have come true of late; now and then one is to be made to see.
    bool worth_it();

    // The work that follows `work`, whose results are there; hidden states are so wide.
    const Work& after(const Work& work, int64_t width, int64_t vocabulary);

    // Whether all that `asked` wants is part of the guess; what it holds came about without `asked`.
    bool covers(const Work& asked);

    // Whether the last guess came true.
    void learn(bool came_true);

    // Writes what was found to where `asked`, which is covered, wants it.
    void report(const Work& asked) const;

    // How many were made, and how many came true.
    int64_t made() const { return made_; }
    int64_t true_ones() const { return true_ones_; }

  private:
    static constexpr double kLeastRate = 0.2, kMemory = 8;
    static constexpr int64_t kBetweenTrials = 16;

    bool is_feed(int64_t mine, const Work& asked, int64_t feed) const;
    void look_across(const Work& work);
    void use_adapters(const Work& work);
    bool uses_as(int64_t mine, const Work& asked, int64_t feed) const;
    void keep_states(const Work& work);
    bool keeps_as(int64_t mine, const Work& asked, int64_t feed) const;

    Work work_{};
    std::vector<int64_t> ids_, rows_, lines_, starts_, ones_, best_, across_counts_;
    std::vector<int32_t> pages_, across_pages_, before_, next_;
    std::vector<Rope> ropes_;
    std::vector<Adapter> adapters_;
    std::vector<int64_t> use_begins_, use_adapters_;
    std::vector<float> use_weights_;
    std::vector<float> values_, totals_, hidden_, logits_;
    std::vector<int64_t> tokens_;
    std::vector<int64_t> covered_;  // per feed that was asked for: which one of the guess
    int64_t width_ = 0, vocabulary_ = 0;
    double rate_ = 1;
    int64_t passed_over_ = 0, made_ = 0, true_ones_ = 0;
};

}  // namespace everystep
