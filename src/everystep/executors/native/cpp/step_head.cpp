// The phase at the end of a step: the last norm, the head, and what is reported of logits.
#include <algorithm>

#include "panel.h"
#include "step.h"

namespace everystep {

// What follows the last layer. The first slice has the last norm, each has its share of the head.
void Runner::finish(Member& member, const Part& part, int64_t slice) {
    if (slice == 0) norm_last(member, part);
    const int64_t rows = part.wanted_end - part.wanted_begin;
    if (rows == 0) return;
    const int64_t first = head_.groups() * slice / part.slices;
    const int64_t last = head_.groups() * (slice + 1) / part.slices;
    crew_->share(member, last - first, [&](int64_t item) {
        const int64_t group = first + item;
        head_columns(group, last_.inputs(), rows, model_.final_softcap,
                     [&](int64_t row) { return head_.place(member.index, row, group); });
        head_.digest(member.index, group);
    });
    if (slice == part.slices - 1)
        crew_->share(member, rows, [&](int64_t row) { head_.report(row); });
}

void Runner::norm_last(Member& member, const Part& part) {
    const Work& work = part.work;
    const NormKind kind = static_cast<NormKind>(model_.norm_kind);
    if (work.hidden)
        crew_->share(member, part.tokens(), [&](int64_t row) {
            normalise(kind, hidden(part, row), model_.width, model_.eps, model_.norm,
                      work.hidden + (part.begin + row) * model_.width);
        });
    crew_->share(member, part.wanted_end - part.wanted_begin, [&](int64_t row) {
        const Wanted& to = wanted_[part.wanted_begin + row];
        float* last = last_.row(row);
        normalise(kind, hidden(part, to.token - part.begin), model_.width, model_.eps, model_.norm, last);
        if (to.hidden) std::copy_n(last, model_.width, to.hidden);
        put_before_head(last, last_, row);
    });
}

// A row of hidden states after the last norm is what the head reads.
void Runner::put_before_head(const float* from, InputBuffer& in, int64_t row) const {
    float* to = in.row(row);
    const float scale = model_.output_scale == 0 ? 1 : model_.output_scale;
    for (int64_t i = 0; i < model_.width; ++i) to[i] = from[i] * scale;
    if (reads_codes(model_.head)) quantise_row(in.inputs(), row);
}

// The logits of one group of columns, of every row to where its group begins.
template <class Place>
void Runner::head_columns(int64_t group, const Inputs& in, int64_t rows, float cap,
                          Place place) const {
    const auto use = [&](int64_t row, int64_t column, simd::Floats x, int count) {
        using namespace simd;
        if (cap != 0) x = mul(tanh(div(x, splat(cap))), splat(cap));
        write(place(row) + column - group * Head::kColumns, x, count);
    };
    constexpr int64_t kPanels = Head::kColumns / kPanel;
    const int64_t last = std::min(panels_in(model_.head), (group + 1) * kPanels);
    for (int64_t panel = group * kPanels; panel < last; ++panel)
        multiply_panel(model_.head, panel, in, rows, use);
}

// The logits of rows of hidden states, a few at a time. `each_group` calls what it is given with every
// group of columns.
template <class From, class EachGroup>
void Runner::read_rows(int64_t rows, From from, float cap, float* logits, EachGroup each_group) const {
    for (int64_t begin = 0; begin < rows; begin += kTogether) {
        const int64_t count = std::min<int64_t>(kTogether, rows - begin);
        InputBuffer in(count, model_.width);
        in.expect(count);
        for (int64_t row = 0; row < count; ++row) put_before_head(from(begin + row), in, row);
        each_group([&](int64_t group) {
            head_columns(group, in.inputs(), count, cap, [&](int64_t row) {
                return logits + (begin + row) * model_.vocabulary + group * Head::kColumns;
            });
        });
    }
}

void Runner::read_early(const Work& work) {
    const int64_t groups = head_groups();
    read_rows(
        work.early_rows,
        [&](int64_t row) { return work.early_hidden + work.early_places[row] * model_.width; }, 0,
        work.early_logits, [&](auto read_group) {
            crew_->run([&](Member& member) { crew_->share(member, groups, read_group); });
        });
}

void Runner::read_out(const float* hidden, int64_t rows, float* logits) const {
    const int64_t groups = head_groups();
    read_rows(
        rows, [&](int64_t row) { return hidden + row * model_.width; }, model_.final_softcap, logits,
        [&](auto read_group) {
            for (int64_t group = 0; group < groups; ++group) read_group(group);
        });
}

}  // namespace everystep
