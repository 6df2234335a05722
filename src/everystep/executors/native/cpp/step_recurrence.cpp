// The phases of a layer that keeps states: a convolution over its last inputs, then a scan.
//
// Channels do not meet but in the products between the phases. So an item is a block of channels, of
// which it goes through all tokens of a part, feed by feed. Source: Gu and Dao 2023, Mamba.
#include <algorithm>
#include <stdexcept>

#include "panel.h"
#include "step.h"

namespace everystep {
namespace {

// Calls `use(column, count)` for both halves of a block of channels, of which the last may be short.
template <class Use>
void each_half(int64_t block, int64_t channels, Use use) {
    for (int64_t column = block * kBlock; column < (block + 1) * kBlock; column += kPanel)
        if (column < channels) use(column, int(std::min(kPanel, channels - column)));
}

}  // namespace

void Runner::check_states(const Work& work) const {
    if (!work.states_before || !work.states_kept || !work.states_after || !work.states_next)
        throw std::logic_error("there are no pages for states");
    const auto there = [&](int32_t page) { return page >= 0 && page < pages_.count(); };
    const int32_t* after = work.states_after;
    for (int64_t feed = 0; feed < work.feeds; after += work.states_kept[feed++]) {
        const int64_t kept = work.states_kept[feed];
        const int32_t before = work.states_before[feed];
        if (kept < 1 || kept > work.counts[feed] || (before != -1 && !there(before)) ||
            !there(work.states_next[feed]) || !std::all_of(after, after + kept, there))
            throw std::logic_error("states lie in pages that there are not");
    }
}

void Runner::recur(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const Recurrence& own = layer.recurrence;
    const int64_t rows = part.tokens(), blocks = blocks_of(model_.inner);
    const PanelItems inward(own.inward, rows, crew_->size()), select(own.select, rows, crew_->size());
    crew_->share(member, inward.count(), [&](int64_t item) {
        inward.write(item, normed_.inputs(), [&](int64_t row) { return entering(row); });
    });
    crew_->share(member, blocks, [&](int64_t block) { convolve(part, index, block); });
    share_then(
        member, select.count(), rows,
        [&](int64_t item) {
            select.write(item, inner_.inputs(), [&](int64_t row) { return selected(row); });
        },
        [&](int64_t row) {
            std::copy_n(selected(row), model_.rank, sizes_.row(row));
            if (reads_codes(own.step)) quantise_row(sizes_.inputs(), row);
        });
    crew_->share(member, blocks, [&](int64_t block) {
        scan(part, index, block, scratch_[member.index].data());
    });
    add_output(member, part, layer.out, inner_, {}, layer.attention_post,
               [&](int64_t row) { before_attention(part, row, index + 1); });
}

// What a stretch begins with, or null where that is zeros. A feed that goes on from the part before
// finds it where the last states of the feed are kept.
const float* Runner::states_before(const Part& part, const Stretch& stretch, int64_t index) const {
    const Work& work = part.work;
    const int32_t last = work.states_after[stretch.kept + work.states_kept[stretch.feed] - 1];
    const int32_t page = stretch.first > 0 ? last : work.states_before[stretch.feed];
    return page < 0 ? nullptr : states_in(page) + index * states_size();
}

// Calls `use(count, states)` for every number of tokens of a stretch after which states are kept, in
// order, with where the layer's are kept.
template <class Use>
void Runner::each_kept(const Part& part, const Stretch& stretch, int64_t index, Use use) const {
    const Work& work = part.work;
    const int64_t kept = work.states_kept[stretch.feed], whole = work.counts[stretch.feed];
    const int32_t* pages = work.states_after + stretch.kept;
    const auto at = [&](int64_t i) { return states_in(pages[i]) + index * states_size(); };
    const int64_t before = whole - kept - stretch.first;  // tokens of the stretch before the first kept one
    for (int64_t i = std::max<int64_t>(0, -before); i < kept && before + 1 + i <= stretch.count; ++i)
        use(before + 1 + i, at(i));
    // The next part goes on from here.
    if (stretch.first + stretch.count < whole) use(stretch.count, at(kept - 1));
}

// What entered at token t of a stretch, before it where t is negative; null before the row began.
const float* Runner::input_at(const Part& part, const Stretch& stretch, int64_t index, int64_t t) const {
    if (t >= 0) return entering(stretch.token + t);
    const float* held = states_before(part, stretch, index);
    return held ? held + (model_.kernel - 1 + t) * model_.inner : nullptr;
}

// A block of channels after the convolution, to where the next product reads it.
void Runner::convolve(const Part& part, int64_t index, int64_t block) {
    for (const Stretch& stretch : part.stretches) {
        for (int64_t t = 0; t < stretch.count; ++t) convolve_token(part, stretch, index, t, block);
        each_half(block, model_.inner, [&](int64_t column, int count) {
            keep_inputs(part, stretch, index, column, count);
        });
    }
}

void Runner::convolve_token(const Part& part, const Stretch& stretch, int64_t index, int64_t t,
                            int64_t block) {
    using namespace simd;
    const Recurrence& own = layers_[index].recurrence;
    const int64_t row = stretch.token + t;
    each_half(block, model_.inner, [&](int64_t column, int count) {
        Floats sum = own.conv_bias ? read(own.conv_bias + column, count) : splat(0.0f);
        for (int64_t k = 0; k < model_.kernel; ++k) {
            const float* from = input_at(part, stretch, index, t + k - model_.kernel + 1);
            if (!from) continue;
            const Floats weight = read(own.conv + k * model_.inner + column, count);
            sum = fma(read(from + column, count), weight, sum);
        }
        write(inner_.row(row) + column, activate(static_cast<Activation>(model_.activation), sum), count);
    });
    if (reads_codes(own.select)) quantise_block(inner_.inputs(), row, block);
}

// What the convolution reads next lies with the states that are kept.
void Runner::keep_inputs(const Part& part, const Stretch& stretch, int64_t index, int64_t column,
                         int count) {
    const int64_t before = model_.kernel - 1;
    each_kept(part, stretch, index, [&](int64_t tokens, float* states) {
        // Ascending: where a part goes on, inputs move to the front of the page they lie in.
        for (int64_t i = 0; i < before; ++i) {
            const float* from = input_at(part, stretch, index, tokens - before + i);
            float* to = states + i * model_.inner + column;
            write(to, from ? read(from + column, count) : simd::splat(0.0f), count);
        }
    });
}

// A block of channels after the scan and its gate, to where the last product reads it. `room`: for
// (rows, 16) step sizes and (states, 16).
void Runner::scan(const Part& part, int64_t index, int64_t block, float* room) {
    const Layer& layer = layers_[index];
    const int64_t rows = part.tokens();
    each_half(block, model_.inner, [&](int64_t column, int count) {
        multiply_panel(layer.recurrence.step, column / kPanel, sizes_.inputs(), rows,
                       [&](int64_t row, int64_t, simd::Floats x, int) {
                           simd::store(room + row * kPanel, simd::softplus(x));
                       });
        for (const Stretch& stretch : part.stretches)
            scan_stretch(part, stretch, index, column, count, room, room + rows * kPanel);
    });
    if (reads_codes(layer.out))
        for (int64_t row = 0; row < rows; ++row) quantise_block(inner_.inputs(), row, block);
}

void Runner::scan_stretch(const Part& part, const Stretch& stretch, int64_t index, int64_t column,
                          int count, const float* sizes, float* states) {
    using namespace simd;
    const Recurrence& own = layers_[index].recurrence;
    const int64_t inner = model_.inner, first = (model_.kernel - 1) * inner + column;
    const float* held = states_before(part, stretch, index);
    for (int64_t s = 0; s < model_.states; ++s)
        store(states + s * kPanel, held ? read(held + first + s * inner, count) : splat(0.0f));
    int64_t done = 0;
    const auto go_on = [&](int64_t until) {
        for (; done < until; ++done) {
            const int64_t row = stretch.token + done;
            const float* write_by = selected(row) + model_.rank;
            const float* read_by = write_by + model_.states;
            float* at = inner_.row(row) + column;
            const Floats size = load(sizes + row * kPanel), x = read(at, count);
            Floats out = mul(x, read(own.skip + column, count));
            for (int64_t s = 0; s < model_.states; ++s) {
                const Floats decay = exp(mul(read(own.decay + s * inner + column, count), size));
                const Floats enters = mul(mul(size, splat(write_by[s])), x);
                const Floats state = fma(decay, load(states + s * kPanel), enters);
                store(states + s * kPanel, state);
                out = fma(state, splat(read_by[s]), out);
            }
            const Floats gate = read(entering(row) + inner + column, count);
            write(at, mul(out, activate(Activation::kSilu, gate)), count);
        }
    };
    each_kept(part, stretch, index, [&](int64_t tokens, float* kept) {
        go_on(tokens);
        for (int64_t s = 0; s < model_.states; ++s)
            write(kept + first + s * inner, load(states + s * kPanel), count);
    });
    go_on(stretch.count);
}

}  // namespace everystep
