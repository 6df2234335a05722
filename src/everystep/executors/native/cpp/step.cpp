#include "step.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "panel.h"

namespace everystep {
namespace {

Reads reads_of(const Mlp& mlp) {
    return {reads_codes(mlp.gate) || reads_codes(mlp.up), reads_values(mlp.gate) || reads_values(mlp.up)};
}

Reads reads_of(const Layer& layer) {
    Reads found = reads_of(layer.dense);
    for (int64_t i = 0; i < layer.experts.count; ++i) {
        const Reads one = reads_of(layer.experts.each[i]);
        found = {found.codes || one.codes, found.values || one.values};
    }
    return found;
}

bool fits(const Mlp& mlp, int64_t inner) {
    return in_columns_of_panels(mlp.up, inner) &&
           (mlp.gate.count == 0 || in_columns_of_panels(mlp.gate, inner));
}

// The largest inner size of any expert.
int64_t most_inner(const std::vector<Layer>& layers) {
    int64_t most = 0;
    for (const Layer& layer : layers)
        for (int64_t i = 0; i < layer.experts.count; ++i)
            most = std::max(most, outputs_of(layer.experts.each[i].up));
    return most;
}

}  // namespace

InputBuffer::InputBuffer(int64_t rows, int64_t columns)
    : inputs_{nullptr, columns, blocks_of(columns), kTogether, nullptr, nullptr, nullptr, nullptr} {
    fit(rows);
}

void InputBuffer::fit(int64_t rows) {
    if (rows <= rows_) return;
    values_.resize(rows * inputs_.columns);
    scales_.resize(whole_groups(rows) * inputs_.blocks);
    sums_.resize(scales_.size());
    codes_.resize(scales_.size() * kBlock);
    offsets_.resize(scales_.size());
    rows_ = rows;
    inputs_ = {values_.data(), inputs_.columns, inputs_.blocks,  inputs_.together,
               codes_.data(),  scales_.data(),  offsets_.data(), sums_.data()};
}

Runner::Runner(const Model& model, KvType type)
    : model_(model),
      layers_(model.layer, model.layer + model.layers),
      shape_{model.kv_heads, model.head_dim, type},
      pages_(shape_.layer() * model.layers),
      hidden_(kMostTokens * model.width),
      qkv_(kMostTokens * (model.heads + 2 * model.kv_heads) * model.head_dim),
      added_(kMostTokens * model.width),
      normed_(kMostTokens, model.width),
      mixed_(kMostTokens, model.heads * model.head_dim),
      inner_(kMostTokens, model.inner),
      last_(kMostTokens, model.width),
      inputs_of_experts_(0, model.width),
      inner_of_experts_(0, most_inner(layers_)) {
    bool fit = in_columns_of_panels(model.head, model.vocabulary);
    for (const Layer& layer : layers_) {
        mlp_reads_.push_back(reads_of(layer));
        const Experts& experts = layer.experts;
        if (experts.count == 0) fit = fit && fits(layer.dense, model.inner);
        for (int64_t i = 0; i < experts.count; ++i)
            fit = fit && fits(experts.each[i], outputs_of(experts.each[i].up)) &&
                  in_columns_of_panels(experts.each[i].down, model.width);
        if (experts.count > 0) fit = fit && in_columns_of_panels(experts.router, experts.count);
    }
    if (!fit) throw std::invalid_argument("a matrix begins within a panel");
}

void Runner::check(const Work& work) const {
    if (std::any_of(work.ids, work.ids + work.tokens,
                    [&](int64_t id) { return id < -1 || id >= model_.vocabulary; }))
        throw std::out_of_range("an id beyond the vocabulary");
    for (int64_t feed = 0; feed < work.feeds; ++feed) {
        const int64_t end = work.starts[feed] + work.counts[feed];
        if (model_.positions && !work.positions && end > model_.places)
            throw std::logic_error("a position has no embedding");
        const int64_t used = (end + kPagePositions - 1) / kPagePositions;
        const int32_t* numbers = work.pages + work.rows[feed] * work.stride;
        if (used > work.stride || std::any_of(numbers, numbers + used, [&](int32_t number) {
                return number < 0 || number >= pages_.count();
            }))
            throw std::logic_error("a row lies in pages that there are not");
    }
}

// Its threads are not in this process: it is neither told to end nor waited for, and never freed.
void Runner::forget_lost_crew() {
    if (!crew_ || !crew_->lost()) return;
    ahead_.reset();
    static_cast<void>(crew_.release());
}

void Runner::run(const Work& work, int threads) {
    check(work);
    forget_lost_crew();
    const Cores::Turn turn(threads);
    if (!was_ahead(work, threads)) {
        list_wanted(work);
        if (!crew_ || crew_->size() != threads) crew_ = std::make_unique<Crew>(threads);
        scratch_.resize(threads);
        for (int64_t i = 0; i < work.copies; ++i) pages_.copy(work.copy_from[i], work.copy_to[i]);
        for (int64_t begin = 0; begin < work.tokens; begin += kMostTokens)
            run_part(make_part(work, begin));
        if (work.early_rows) read_early(work);
    }
    if (work.ahead && !turn.is_crowded()) run_ahead(work);
}

// Whether the position after each row is one that the model can place.
bool Runner::can_go_on(const Work& work) const {
    if (!model_.positions) return true;
    for (int64_t feed = 0; feed < work.feeds; ++feed)
        if (work.starts[feed] + work.counts[feed] >= model_.places) return false;
    return true;
}

// The members but the caller begin with what most likely comes next.
void Runner::run_ahead(const Work& work) {
    if (crew_->size() == 1 || work.feeds > kMostTokens || !can_go_on(work)) return;
    if (!Guess::follows(work) || !guess_.worth_it()) return;
    try {
        start_ahead(guess_.after(work, model_.width));
    } catch (const std::bad_alloc&) {
        ahead_.reset();  // It need not be begun before it is asked for.
    }
}

void Runner::start_ahead(const Work& next) {
    list_wanted(next);
    ahead_.emplace(make_part(next, 0));
    make_room(*ahead_);
    crew_->start([this](Member& member) {
        embed(member, *ahead_);
        run_layers(member, *ahead_, 0);
    });
}

// Whether the work is what was begun: then it is completed and told, and else it is given up.
bool Runner::was_ahead(const Work& work, int threads) {
    if (!ahead_) return false;
    const bool is_this = crew_->size() == threads && guess_.covers(work);
    guess_.learn(is_this);
    if (!is_this) {
        give_up_ahead();
        return false;
    }
    crew_->join([this](Member& member, int64_t door) { run_layers(member, *ahead_, door); });
    ahead_.reset();
    guess_.tell(work);
    return true;
}

void Runner::give_up_ahead() {
    forget_lost_crew();
    if (ahead_) crew_->give_up();
    ahead_.reset();
}

void Runner::reserve(int64_t pages) {
    if (pages <= pages_.count()) return;
    give_up_ahead();
    pages_.reserve(pages);
}

void Runner::list_wanted(const Work& work) {
    wanted_.clear();
    int64_t end = 0, whole = 0, best = 0;
    for (int64_t feed = 0; feed < work.feeds; ++feed) {
        end += work.counts[feed];
        for (int64_t i = work.wanted[feed]; i > 0; --i) {
            Wanted one{end - i, work.best[feed], nullptr, nullptr, nullptr, nullptr, nullptr};
            if (one.best == 0) {
                one.logits = work.logits + whole * model_.vocabulary;
                if (work.totals) one.total = work.totals + whole;
                ++whole;
            } else {
                one.values = work.best_values + best * work.most;
                one.tokens = work.best_tokens + best * work.most;
                if (work.best_totals) one.total = work.best_totals + best;
                if (work.best_hidden) one.hidden = work.best_hidden + best * model_.width;
                ++best;
            }
            wanted_.push_back(one);
        }
    }
}

Runner::Part Runner::make_part(const Work& work, int64_t begin) const {
    Part part{work, begin, std::min(begin + kMostTokens, work.tokens), 1, false, {}, {}, {}, {}, 0, 0};
    const int64_t group = model_.heads / model_.kv_heads;
    const int64_t together = std::max<int64_t>(1, kMostQueries / group);
    int64_t offset = 0;
    for (int64_t feed = 0; feed < work.feeds; offset += work.counts[feed++]) {
        const int64_t from = std::max(offset, part.begin);
        const int64_t to = std::min(offset + work.counts[feed], part.end);
        for (int64_t token = from; token < to; ++token) {
            part.row_of.push_back(work.rows[feed]);
            part.position_of.push_back(work.starts[feed] + token - offset);
            part.feed_of.push_back(feed);
        }
        for (int64_t token = from; token < to; token += together)
            part.tiles.push_back({work.rows[feed], token - part.begin, std::min(together, to - token),
                                  work.starts[feed] + token - offset});
    }
    for (const Tile& tile : part.tiles)
        part.spans = std::max(part.spans, (tile.position + tile.count - 1) / kSpan + 1);
    part.spread = part.spans > 1 && int64_t(part.tiles.size()) == part.tokens() &&
                  items(part) < 4 * crew_->size();
    const auto place = [&](int64_t token) {
        const auto before = [](const Wanted& one, int64_t at) { return one.token < at; };
        return std::lower_bound(wanted_.begin(), wanted_.end(), token, before) - wanted_.begin();
    };
    part.wanted_begin = place(part.begin);
    part.wanted_end = place(part.end);
    return part;
}

void Runner::make_room(const Part& part) {
    int64_t room = part.spans * seen_size() + kMostQueries * whole_vectors(model_.head_dim);
    for (const Layer& layer : layers_) {
        if (layer.experts.count == 0) continue;
        const int64_t places = Routing::most_places(layer.experts, part.tokens());
        routing_.expect(layer.experts, part.tokens());
        inputs_of_experts_.fit(places);
        inner_of_experts_.fit(places);
        room = std::max(room, part.tokens() * kPanel);
    }
    for (std::vector<float>& scratch : scratch_)
        if (int64_t(scratch.size()) < room) scratch.resize(room * 3 / 2);
    if (part.spread) spread_.resize(items(part) * part.spans * seen_size());
    for (InputBuffer* buffer : {&normed_, &mixed_, &inner_}) buffer->expect(part.tokens());
    last_.expect(part.wanted_end - part.wanted_begin);
    head_.start(wanted_.data() + part.wanted_begin, part.wanted_end - part.wanted_begin,
                model_.vocabulary, crew_->size());
}

void Runner::run_part(const Part& part) {
    make_room(part);
    crew_->run([&](Member& member) {
        embed(member, part);
        run_layers(member, part, 0);
    });
}

void Runner::run_layers(Member& member, const Part& part, int64_t from) {
    for (int64_t index = from; index < model_.layers; ++index) {
        if (!crew_->pass(member, index)) return;
        run_layer(member, part, index);
    }
    if (crew_->pass(member, model_.layers)) finish(member, part);
}

void Runner::embed(Member& member, const Part& part) {
    crew_->share(member, part.tokens(), [&](int64_t token) {
        embed_token(part, token);
        before_attention(part, token, 0);
    });
}

void Runner::embed_token(const Part& part, int64_t token) {
    float* to = hidden_.data() + token * model_.width;
    read_token(part, token, to);
    if (!model_.positions) return;
    const int32_t* given = part.work.positions;
    const int64_t position = given ? given[part.begin + token] : part.position_of[token];
    add_to(to, model_.positions + position * model_.width, model_.width);
}

void Runner::read_token(const Part& part, int64_t token, float* to) const {
    const int64_t id = part.work.ids[part.begin + token];
    if (id >= 0) {
        read_row(model_.embedding, id, to);
        if (model_.embed_scale != 0)
            for (int64_t i = 0; i < model_.width; ++i) to[i] *= model_.embed_scale;
        return;
    }
    for (int64_t i = 0; i < part.work.embeds; ++i) {
        const Embeds& given = part.work.embed[i];
        const int64_t at = part.begin + token - given.offset;
        if (at >= 0 && at < given.count)
            std::copy_n(given.values + at * model_.width, model_.width, to);
    }
}

void Runner::norm_row(int64_t row, const Norm& norm, bool coded) {
    const float* from = hidden_.data() + row * model_.width;
    if (norm.weight)
        normalise(static_cast<NormKind>(model_.norm_kind), from, model_.width, model_.eps, norm,
                  normed_.row(row));
    else
        std::copy_n(from, model_.width, normed_.row(row));
    if (coded) quantise_row(normed_.inputs(), row);
}

void Runner::before_attention(const Part& part, int64_t row, int64_t index) {
    const Work& work = part.work;
    for (int64_t i = 0; i < work.early; ++i)
        if (work.early_layers[i] == index)
            std::copy_n(hidden_.data() + row * model_.width, model_.width,
                        work.early_hidden + (i * work.tokens + part.begin + row) * model_.width);
    if (index > 0 && index <= work.deep_layers) add_features(part, row, index - 1);
    if (index == model_.layers) return;
    const Layer& layer = layers_[index];
    const bool coded = reads_codes(layer.qkv) || (shares_norm(layer) && mlp_reads_[index].codes);
    norm_row(row, layer.attention, coded);
}

// What a layer's hidden states are given besides, by whoever feeds the position.
void Runner::add_features(const Part& part, int64_t row, int64_t index) {
    const Work& work = part.work;
    for (int64_t i = 0; i < work.deep; ++i) {
        const Embeds& given = work.added[i];
        const int64_t at = part.begin + row - given.offset;
        if (at >= 0 && at < given.count)
            add_to(hidden_.data() + row * model_.width,
                   given.values + (at * work.deep_layers + index) * model_.width, model_.width);
    }
}

void Runner::before_mlp(int64_t row, int64_t index) {
    const Layer& layer = layers_[index];
    if (!shares_norm(layer)) norm_row(row, layer.mlp, mlp_reads_[index].codes);
}

void Runner::run_layer(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const int64_t rows = part.tokens();
    const int64_t width = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    share_then(
        member, panels_in(layer.qkv), rows,
        [&](int64_t panel) {
            multiply_panel(layer.qkv, panel, normed_.inputs(), rows,
                           [&](int64_t row, int64_t column, simd::Floats x, int count) {
                               write(qkv_.data() + row * width + column, x, count);
                           });
        },
        [&](int64_t row) {
            place(part, index, row);
            // Nothing reads what attention reads any more, and the layer's input is still there.
            if (model_.parallel) before_mlp(row, index);
        });
    if (part.work.attentions)
        crew_->share(member, rows * model_.heads, [&](int64_t number) {
            report_weights(part, index, number / model_.heads, number % model_.heads);
        });
    attend_all(member, part, index);
    add_output(member, rows, layer.out, mixed_, layer.attention_post, [&](int64_t row) {
        if (!model_.parallel) before_mlp(row, index);
    });
    if (layer.experts.count > 0) return run_experts(member, part, index);
    expand(member, part, index);
    add_output(member, rows, layer.dense.down, inner_, layer.mlp_post,
               [&](int64_t row) { before_attention(part, row, index + 1); });
}

template <class Then>
void Runner::add_output(Member& member, int64_t rows, const Linear& linear, const InputBuffer& in,
                        const Norm& post, Then each_row) {
    float* to = post.weight ? added_.data() : hidden_.data();
    const int64_t width = model_.width;
    share_then(
        member, panels_in(linear), rows,
        [&](int64_t panel) {
            multiply_panel(linear, panel, in.inputs(), rows,
                           [&](int64_t row, int64_t column, simd::Floats x, int count) {
                               float* at = to + row * width + column;
                               write(at, post.weight ? x : simd::add(read(at, count), x), count);
                           });
        },
        [&](int64_t row) {
            if (post.weight) add_normalised(row, post);
            each_row(row);
        });
}

// What was made for a row comes to it, normalised.
void Runner::add_normalised(int64_t row, const Norm& post) {
    const int64_t width = model_.width;
    float* added = added_.data() + row * width;
    normalise(static_cast<NormKind>(model_.norm_kind), added, width, model_.eps, post, added);
    add_to(hidden_.data() + row * width, added, width);
}

void Runner::finish(Member& member, const Part& part) {
    const Work& work = part.work;
    const NormKind kind = static_cast<NormKind>(model_.norm_kind);
    if (work.hidden)
        crew_->share(member, part.tokens(), [&](int64_t row) {
            normalise(kind, hidden_.data() + row * model_.width, model_.width, model_.eps, model_.norm,
                      work.hidden + (part.begin + row) * model_.width);
        });
    const int64_t rows = part.wanted_end - part.wanted_begin;
    if (rows == 0) return;
    const bool coded = reads_codes(model_.head);
    const float cap = model_.final_softcap;
    crew_->share(member, rows, [&](int64_t row) {
        const Wanted& to = wanted_[part.wanted_begin + row];
        normalise(kind, hidden_.data() + (to.token - part.begin) * model_.width, model_.width,
                  model_.eps, model_.norm, last_.row(row));
        if (to.hidden) std::copy_n(last_.row(row), model_.width, to.hidden);
        if (coded) quantise_row(last_.inputs(), row);
    });
    crew_->share(member, head_.groups(), [&](int64_t group) {
        head_columns(group, last_.inputs(), rows, cap,
                     [&](int64_t row) { return head_.place(member.index, row, group); });
        head_.digest(member.index, group);
    });
    crew_->share(member, rows, [&](int64_t row) { head_.tell(row); });
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

void Runner::read_early(const Work& work) {
    const int64_t groups = (model_.vocabulary + Head::kColumns - 1) / Head::kColumns;
    const bool coded = reads_codes(model_.head);
    for (int64_t begin = 0; begin < work.early_rows; begin += kTogether) {
        const int64_t count = std::min<int64_t>(kTogether, work.early_rows - begin);
        InputBuffer in(count, model_.width);
        in.expect(count);
        for (int64_t row = 0; row < count; ++row) {
            const float* from = work.early_hidden + work.early_places[begin + row] * model_.width;
            std::copy_n(from, model_.width, in.row(row));
            if (coded) quantise_row(in.inputs(), row);
        }
        crew_->run([&](Member& member) {
            crew_->share(member, groups, [&](int64_t group) {
                head_columns(group, in.inputs(), count, 0, [&](int64_t row) {
                    return work.early_logits + (begin + row) * model_.vocabulary +
                           group * Head::kColumns;
                });
            });
        });
    }
}

void Runner::read_out(const float* hidden, int64_t rows, float* logits) const {
    const float cap = model_.final_softcap;
    const int64_t groups = (model_.vocabulary + Head::kColumns - 1) / Head::kColumns;
    const bool coded = reads_codes(model_.head);
    for (int64_t begin = 0; begin < rows; begin += kTogether) {
        const int64_t count = std::min<int64_t>(kTogether, rows - begin);
        InputBuffer in(count, model_.width);
        in.expect(count);
        for (int64_t row = 0; row < count; ++row) {
            std::copy_n(hidden + (begin + row) * model_.width, model_.width, in.row(row));
            if (coded) quantise_row(in.inputs(), row);
        }
        for (int64_t group = 0; group < groups; ++group)
            head_columns(group, in.inputs(), count, cap, [&](int64_t row) {
                return logits + (begin + row) * model_.vocabulary + group * Head::kColumns;
            });
    }
}

}  // namespace everystep
