// The phase of a step between attention and the next layer: an MLP, or the experts that rows chose.
#include <algorithm>

#include "panel.h"
#include "step.h"

namespace everystep {

// The inputs to an MLP's last product. An item is a block of its codes, two panels wide.
void Runner::expand(Member& member, const Part& part, int64_t index) {
    const Mlp& mlp = layers_[index].dense;
    reduce(member, part, index, kByUp);
    PanelChanges gate = changes_of(member, part, index, kGate);
    PanelChanges up = changes_of(member, part, index, kUp);
    const bool valued = reads_values(mlp.down) || part.uses.change(index, kDown);
    crew_->share(member, blocks_of(model_.inner), [&](int64_t block) {
        expand_block(mlp, normed_.inputs(), part.tokens(), inner_.inputs(), block, valued, gate, up);
    });
}

// One block of what rows have between the products of an MLP, to where its last one reads it.
void Runner::expand_block(const Mlp& mlp, const Inputs& in, int64_t rows, const Inputs& to, int64_t block,
                          bool valued, PanelChanges& gate, PanelChanges& up) const {
    const bool coded = reads_codes(mlp.down);
    const int64_t size = outputs_of(mlp.up), first = 2 * block;
    const int64_t panels = std::min<int64_t>(2, panels_of(size) - first);
    gate.prepare(first, panels), up.prepare(first, panels);
    each_tile(rows, [&](auto count, int64_t row) {
        simd::Floats inner[2][count];
        for (int64_t i = 0; i < 2; ++i)
            if (i < panels)
                inner_values(mlp, in, first, i, row, gate, up, inner[i]);
            else
                std::fill_n(inner[i], int(count), simd::splat(0.0f));
        for (int m = 0; m < count; ++m) {
            if (coded) quantise_block(to, row + m, block, inner[0][m], inner[1][m]);
            for (int64_t i = 0; valued && i < panels; ++i) {
                const int64_t column = (first + i) * kPanel;
                write(to.values + (row + m) * to.columns + column, inner[i][m],
                      int(std::min(kPanel, size - column)));
            }
        }
    });
}

// What M rows from `row` on have between an MLP's products, 16 columns of it: panel `first + place`.
template <int M>
void Runner::inner_values(const Mlp& mlp, const Inputs& in, int64_t first, int64_t place, int64_t row,
                          const PanelChanges& gate, const PanelChanges& up, simd::Floats (&out)[M]) const {
    const int64_t number = first + place;
    const Activation kind = static_cast<Activation>(model_.activation);
    const bool gated = mlp.gate.count > 0;
    const Panel panel = panel_of(mlp.up, number);
    if (!gated) {
        panel.products(in, row, out);
        for (int m = 0; m < M; ++m) out[m] = activate(kind, up.changed(number, row + m, out[m]));
        return;
    }
    simd::Floats factors[M];
    products_of_two(panel_of(mlp.gate, number), panel, in, row, out, factors);
    for (int m = 0; m < M; ++m)
        out[m] = simd::mul(activate(kind, gate.changed(number, row + m, out[m])),
                           up.changed(number, row + m, factors[m]));
}

void Runner::run_experts(Member& member, const Part& part, int64_t index) {
    const Experts& experts = layers_[index].experts;
    const Norm& post = layers_[index].mlp_post;
    const int64_t rows = part.tokens();
    route(member, rows, index);
    const int64_t blocks = inner_of_experts_.inputs().blocks;
    PanelChanges none;
    crew_->share(member, int64_t(routing_.chosen().size()) * blocks, [&](int64_t item) {
        const ChosenExpert& one = routing_.chosen()[item / blocks];
        const Mlp& mlp = experts.each[one.number];
        const Inputs inner = inner_of(mlp, one);
        if (item % blocks < inner.blocks)
            expand_block(mlp, read_by(one, rows), one.count, inner, item % blocks,
                         reads_values(mlp.down), none, none);
    });
    share_then(
        member, panels_of(model_.width), rows,
        [&](int64_t panel) {
            add_experts(experts, part, panel, post, scratch_[member.index].data());
        },
        [&](int64_t row) {
            after_sum(part, row, post);
            before_attention(part, row, index + 1);
        });
}

// Each row has chosen its experts, and what those read lies row beside row.
void Runner::route(Member& member, int64_t rows, int64_t index) {
    const Experts& experts = layers_[index].experts;
    const PanelItems router(experts.router, rows, crew_->size());
    const auto ask = [&](int64_t item) {
        router.write(item, normed_.inputs(), [&](int64_t row) { return routing_.logits(experts, row); });
    };
    const auto choose = [&](int64_t row) { routing_.choose(experts, row); };
    const auto gather = [&](int64_t i) { this->gather(routing_.chosen()[i], index); };
    if (rows > kFewRows) {
        crew_->share(member, router.count(), ask);
        crew_->share(member, rows, choose, [&] { routing_.put_in_order(experts, rows); });
        crew_->share(member, int64_t(routing_.chosen().size()), gather);
        return;
    }
    crew_->share(member, router.count(), ask, [&] {
        for (int64_t row = 0; row < rows; ++row) choose(row);
        routing_.put_in_order(experts, rows);
        for (size_t i = 0; rows > 1 && i < routing_.chosen().size(); ++i) gather(int64_t(i));
    });
}

void Runner::gather(const ChosenExpert& one, int64_t index) {
    const Inputs to = rows_of(one, inputs_of_experts_.inputs(), model_.width);
    for (int64_t i = 0; i < one.count; ++i) {
        const int64_t row = routing_.row_at(one.place + i);
        if (mlp_reads_[index].codes) copy_codes(normed_.inputs(), row, to, i);
        if (mlp_reads_[index].values)
            std::copy_n(normed_.row(row), model_.width, to.values + i * to.columns);
    }
}

// What an expert's first products read; a single row is there already.
Inputs Runner::read_by(const ChosenExpert& one, int64_t rows) const {
    return rows == 1 ? normed_.inputs() : rows_of(one, inputs_of_experts_.inputs(), model_.width);
}

// What its last product reads.
Inputs Runner::inner_of(const Mlp& expert, const ChosenExpert& one) const {
    return rows_of(one, inner_of_experts_.inputs(), outputs_of(expert.up));
}

// Sixteen columns of what all experts give to all rows, expert by expert. `sums`: (rows, 16).
void Runner::add_experts(const Experts& experts, const Part& part, int64_t panel, const Norm& post,
                         float* sums) {
    const int64_t rows = part.tokens();
    const bool later = is_added_later(post);
    std::fill_n(sums, rows * kPanel, 0.0f);
    for (const ChosenExpert& one : routing_.chosen()) {
        const Mlp& mlp = experts.each[one.number];
        multiply_panel(mlp.down, panel, inner_of(mlp, one), one.count,
                       [&](int64_t i, int64_t, simd::Floats x, int) {
                           using namespace simd;
                           float* sum = sums + routing_.row_at(one.place + i) * kPanel;
                           const Floats share = splat(routing_.share_at(one.place + i));
                           store(sum, fma(x, share, load(sum)));
                       });
    }
    const int64_t column = panel * kPanel;
    const int count = int(std::min(kPanel, model_.width - column));
    for (int64_t row = 0; row < rows; ++row) {
        const simd::Floats sum = simd::load(sums + row * kPanel);
        float* at = (later ? added_.data() + row * model_.width : hidden(part, row)) + column;
        write(at, later ? sum : simd::add(read(at, count), sum), count);
    }
}

}  // namespace everystep
