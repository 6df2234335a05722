// What an encoder does in another order than a decoder, and what is kept of its states.
#include <algorithm>
#include <stdexcept>

#include "panel.h"
#include "step.h"

namespace everystep {

// Every position sees all others, so all have a layer's keys and values before any looks at them.
void Runner::run_both_ways(const Work& work) {
    fit(std::min(kMostTokens, work.tokens), work.tokens);
    std::vector<Part> parts;
    for (int64_t begin = 0; begin < work.tokens; begin += kMostTokens)
        parts.push_back(make_part(work, begin));
    run_pass(parts, [&](Member& member, const Part& part) { embed(member, part); });
    for (int64_t index = 0; index < model_.layers; ++index) {
        run_pass(parts, [&](Member& member, const Part& part) {
            crew_->share(member, part.tokens(), [&](int64_t row) { enter(part, row, index); });
            make_queries(member, part, index);
        });
        run_pass(parts, [&](Member& member, const Part& part) { mix(member, part, index); });
    }
    run_pass(parts, [&](Member& member, const Part& part) { finish(member, part, 0); });
}

template <class Pass>
void Runner::run_pass(const std::vector<Part>& parts, Pass pass) {
    for (const Part& part : parts) {
        make_room(part);
        crew_->run([&](Member& member) { pass(member, part); });
    }
}

// Rows of states pass through the buffers as tokens do.
void Runner::keep_states(const float* states, int64_t count, const int32_t* numbers, int threads) {
    const int64_t width = qkv_width(), heads = model_.kv_heads, dim = model_.head_dim;
    if (std::any_of(numbers, numbers + pages_for(count),
                    [&](int32_t number) { return number < 0 || number >= across_.count(); }))
        throw std::logic_error("encoder states lie in pages that there are not");
    const bool coded = std::any_of(layers_.begin(), layers_.end(),
                                   [](const Layer& layer) { return reads_codes(layer.across_kv); });
    const Cores::Turn turn(threads);
    give_up_ahead();
    start_crew(threads);
    for (int64_t begin = 0; begin < count; begin += kMostTokens) {
        const int64_t rows = std::min(kMostTokens, count - begin);
        fit(rows, rows);
        normed_.expect(rows);
        crew_->run([&](Member& member) {
            crew_->share(member, rows, [&](int64_t row) {
                std::copy_n(states + (begin + row) * model_.width, model_.width, normed_.row(row));
                if (coded) quantise_row(normed_.inputs(), row);
            });
            for (int64_t index = 0; index < model_.layers; ++index) {
                const Linear& linear = layers_[index].across_kv;
                const PanelItems items(linear, rows, crew_->size());
                crew_->share(member, items.count(), [&](int64_t item) {
                    items.write(item, normed_.inputs(), [&](int64_t row) { return qkv_.data() + row * width; });
                });
                crew_->share(member, rows, [&](int64_t row) {
                    const float* made = qkv_.data() + row * width;
                    for (int64_t head = 0; head < heads; ++head)
                        write_position(keys_of(numbers, index, head, true), begin + row,
                                       made + head * dim, made + (heads + head) * dim);
                });
            }
        });
    }
}

}  // namespace everystep
