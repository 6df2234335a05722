#include "guess.h"

#include <algorithm>

#include "pages.h"

namespace everystep {

bool Guess::follows(const Work& work) {
    for (int64_t feed = 0; feed < work.feeds; ++feed)
        if (work.wanted[feed] != 1 || work.best[feed] == 0) return false;
    for (int64_t i = 0; i < work.ropes; ++i)
        if (work.rope[i].row) return false;
    return !work.hidden && !work.early && !work.attentions && !work.positions;
}

bool Guess::worth_it() {
    if (rate_ >= kLeastRate) return true;
    return ++passed_over_ % kBetweenTrials == 0;
}

const Work& Guess::after(const Work& work, int64_t width, int64_t vocabulary) {
    width_ = width, vocabulary_ = vocabulary;
    const int64_t feeds = work.feeds;
    ids_.resize(feeds), starts_.resize(feeds), lines_.resize(feeds);
    int64_t stride = 0;
    for (int64_t feed = 0; feed < feeds; ++feed) {
        // One position of each feed is reported, so results are in the order of feeds.
        ids_[feed] = work.best_tokens[feed * work.most];
        starts_[feed] = work.starts[feed] + work.counts[feed];
        lines_[feed] = feed;
        stride = std::max(stride, starts_[feed] / kPagePositions + 1);
    }
    rows_.assign(work.rows, work.rows + feeds);
    best_.assign(work.best, work.best + feeds);
    ones_.assign(feeds, 1);
    pages_.assign(feeds * stride, 0);
    for (int64_t feed = 0; feed < feeds && !work.states_kept; ++feed)
        std::copy_n(work.pages + rows_[feed] * work.stride, starts_[feed] / kPagePositions + 1,
                    pages_.data() + feed * stride);
    ropes_.assign(work.rope, work.rope + work.ropes);
    values_.resize(feeds * work.most), tokens_.resize(feeds * work.most), totals_.resize(feeds);
    if (work.best_hidden) hidden_.resize(feeds * width);
    if (work.best_logits) logits_.resize(feeds * vocabulary);
    ++made_;
    work_ = {};
    work_.tokens = work_.feeds = feeds;
    work_.ropes = work.ropes, work_.rope = ropes_.data();
    work_.ids = ids_.data(), work_.rows = lines_.data(), work_.starts = starts_.data();
    work_.counts = work_.wanted = ones_.data();
    work_.pages = pages_.data(), work_.stride = stride;
    work_.best = best_.data(), work_.most = work.most;
    work_.best_values = values_.data(), work_.best_tokens = tokens_.data();
    work_.best_totals = work.best_totals ? totals_.data() : nullptr;
    work_.best_hidden = work.best_hidden ? hidden_.data() : nullptr;
    work_.best_logits = work.best_logits ? logits_.data() : nullptr;
    if (work.across_rows) look_across(work);
    if (work.use_begins) use_adapters(work);
    if (work.states_kept) keep_states(work);
    return work_;
}

// The rows go on from the last states that they keep.
void Guess::keep_states(const Work& work) {
    const int32_t* after = work.states_after;
    before_.resize(work.feeds);
    for (int64_t feed = 0; feed < work.feeds; ++feed) {
        after += work.states_kept[feed];
        before_[feed] = after[-1];
    }
    next_.assign(work.states_next, work.states_next + work.feeds);
    work_.states_before = before_.data(), work_.states_kept = ones_.data();
    work_.states_after = work_.states_next = next_.data();
}

// The rows look at the encoder states that they looked at before.
void Guess::look_across(const Work& work) {
    const int64_t feeds = work.feeds, stride = work.across_stride;
    across_counts_.assign(work.across_counts, work.across_counts + feeds);
    across_pages_.resize(feeds * stride);
    for (int64_t feed = 0; feed < feeds; ++feed)
        std::copy_n(work.across_pages + work.across_rows[feed] * stride, stride,
                    across_pages_.data() + feed * stride);
    work_.across_rows = lines_.data(), work_.across_counts = across_counts_.data();
    work_.across_pages = across_pages_.data(), work_.across_stride = stride;
}

// The rows use the adapters that they used before.
void Guess::use_adapters(const Work& work) {
    const int64_t uses = work.use_begins[work.feeds];
    adapters_.assign(work.adapter, work.adapter + work.adapters);
    use_begins_.assign(work.use_begins, work.use_begins + work.feeds + 1);
    use_adapters_.assign(work.use_adapters, work.use_adapters + uses);
    use_weights_.assign(work.use_weights, work.use_weights + uses);
    work_.adapters = work.adapters, work_.adapter = adapters_.data();
    work_.use_begins = use_begins_.data();
    work_.use_adapters = use_adapters_.data(), work_.use_weights = use_weights_.data();
}

// An adapter is told by what it points to, which lives on until the guess is given up or asked for.
bool Guess::uses_as(int64_t mine, const Work& asked, int64_t feed) const {
    const int64_t first = asked.use_begins ? asked.use_begins[feed] : 0;
    const int64_t count = asked.use_begins ? asked.use_begins[feed + 1] - first : 0;
    const int64_t own = work_.use_begins ? use_begins_[mine] : 0;
    if (count != (work_.use_begins ? use_begins_[mine + 1] - own : 0)) return false;
    for (int64_t i = 0; i < count; ++i)
        if (asked.adapter[asked.use_adapters[first + i]].layer != adapters_[use_adapters_[own + i]].layer ||
            asked.use_weights[first + i] != use_weights_[own + i])
            return false;
    return true;
}

bool Guess::covers(const Work& asked) {
    if (!follows(asked) || asked.embeds || asked.deep || asked.copies) return false;
    if (asked.best_totals && !work_.best_totals) return false;
    if (asked.best_hidden && !work_.best_hidden) return false;
    if (asked.best_logits && !work_.best_logits) return false;
    covered_.clear();
    int64_t mine = 0;
    for (int64_t feed = 0, token = 0; feed < asked.feeds; token += asked.counts[feed++]) {
        while (mine < work_.feeds && rows_[mine] != asked.rows[feed]) ++mine;
        if (mine == work_.feeds || ids_[mine] != asked.ids[token] || !is_feed(mine, asked, feed))
            return false;
        covered_.push_back(mine);
    }
    return true;
}

bool Guess::is_feed(int64_t mine, const Work& asked, int64_t feed) const {
    if (asked.counts[feed] != 1 || asked.starts[feed] != starts_[mine] || asked.best[feed] != best_[mine])
        return false;
    if (!uses_as(mine, asked, feed)) return false;
    if (asked.across_rows) {
        const int64_t count = asked.across_counts[feed];
        const int32_t* across = asked.across_pages + asked.across_rows[feed] * asked.across_stride;
        if (count != across_counts_[mine] ||
            !std::equal(across, across + pages_for(count),
                        across_pages_.data() + mine * work_.across_stride))
            return false;
    }
    if (asked.states_kept) return keeps_as(mine, asked, feed);
    const int32_t* pages = asked.pages + asked.rows[feed] * asked.stride;
    return std::equal(pages, pages + starts_[mine] / kPagePositions + 1,
                      pages_.data() + mine * work_.stride);
}

// All feeds so far have one position, so they keep one page of states each.
bool Guess::keeps_as(int64_t mine, const Work& asked, int64_t feed) const {
    return asked.states_before[feed] == before_[mine] && asked.states_after[feed] == next_[mine];
}

void Guess::learn(bool came_true) {
    true_ones_ += came_true;
    rate_ += (came_true - rate_) / kMemory;
}

void Guess::report(const Work& asked) const {
    for (int64_t feed = 0; feed < asked.feeds; ++feed) {
        const int64_t mine = covered_[feed];
        std::copy_n(values_.data() + mine * work_.most, best_[mine], asked.best_values + feed * asked.most);
        std::copy_n(tokens_.data() + mine * work_.most, best_[mine], asked.best_tokens + feed * asked.most);
        if (asked.best_totals) asked.best_totals[feed] = totals_[mine];
        if (asked.best_hidden)
            std::copy_n(hidden_.data() + mine * width_, width_, asked.best_hidden + feed * width_);
        if (asked.best_logits)
            std::copy_n(logits_.data() + mine * vocabulary_, vocabulary_,
                        asked.best_logits + feed * vocabulary_);
    }
}

}  // namespace everystep
