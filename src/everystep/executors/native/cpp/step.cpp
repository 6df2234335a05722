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
    : inputs_{} {
    inputs_.columns = columns, inputs_.blocks = blocks_of(columns), inputs_.together = kTogether;
    fit(rows);
}

void InputBuffer::fit(int64_t rows) {
    if (rows <= rows_) return;
    values_.resize(rows * inputs_.columns);
    scales_.resize(whole_groups(rows) * inputs_.blocks);
    sums_.resize(scales_.size());
    codes_.resize(scales_.size() * kBlock);
    offsets_.resize(scales_.size());
    firsts_.resize(scales_.size());
    rows_ = rows;
    inputs_ = {values_.data(), inputs_.columns, inputs_.blocks, inputs_.together, codes_.data(),
               scales_.data(), offsets_.data(), sums_.data(),   firsts_.data()};
}

Runner::Runner(const Model& model, KvType type)
    : model_(model),
      layers_(model.layer, model.layer + model.layers),
      shape_{model.kv_heads, model.head_dim, type},
      pages_(model.states ? states_size() * int64_t(sizeof(float)) * model.layers
                          : shape_.layer() * (model.both_ways ? 1 : model.layers)),
      across_(shape_.layer() * model.layers),
      normed_(0, model.width),
      mixed_(0, model.heads * model.head_dim),
      inner_(0, model.inner),
      last_(0, model.width),
      turned_normed_(0, model.width),
      turned_mixed_(0, model.heads * model.head_dim),
      turned_inner_(0, model.inner),
      inputs_of_experts_(0, model.width),
      inner_of_experts_(0, most_inner(layers_)),
      sizes_(0, model.rank) {
    bool fit = in_columns_of_panels(model.head, model.vocabulary);
    for (const Layer& layer : layers_) {
        mlp_reads_.push_back(reads_of(layer));
        const Experts& experts = layer.experts;
        const bool recurs = layer.recurrence.inward.count > 0;
        if (recurs) fit = fit && in_columns_of_panels(layer.recurrence.step, model.inner);
        if (!recurs && experts.count == 0) fit = fit && fits(layer.dense, model.inner);
        for (int64_t i = 0; i < experts.count; ++i)
            fit = fit && fits(experts.each[i], outputs_of(experts.each[i].up)) &&
                  in_columns_of_panels(experts.each[i].down, model.width);
        if (experts.count > 0) fit = fit && in_columns_of_panels(experts.router, experts.count);
    }
    if (!fit) throw std::invalid_argument("a matrix begins within a panel");
}

void Runner::check(const Work& work) const {
    const auto all_there = [](const int32_t* numbers, int64_t used, int64_t stride, const Pages& pages) {
        return used <= stride && std::all_of(numbers, numbers + used, [&](int32_t number) {
            return number >= 0 && number < pages.count();
        });
    };
    if (std::any_of(work.ids, work.ids + work.tokens,
                    [&](int64_t id) { return id < -1 || id >= model_.vocabulary; }))
        throw std::out_of_range("an id beyond the vocabulary");
    for (int64_t i = 0; i < work.ropes; ++i) check_rope(work, work.rope[i]);
    check_uses(work);
    if (model_.states) return check_states(work);
    for (int64_t feed = 0; feed < work.feeds; ++feed) {
        const int64_t end = work.starts[feed] + work.counts[feed];
        if (model_.positions && !work.positions && end > model_.places)
            throw std::logic_error("a position has no embedding");
        if (!all_there(work.pages + work.rows[feed] * work.stride, pages_for(end), work.stride, pages_))
            throw std::logic_error("a row lies in pages that there are not");
        if (!work.across_rows) continue;
        const int32_t* numbers = work.across_pages + work.across_rows[feed] * work.across_stride;
        const int64_t count = work.across_counts[feed];
        if (count < 1 || !all_there(numbers, pages_for(count), work.across_stride, across_))
            throw std::logic_error("encoder states lie in pages that there are not");
    }
    if (!work.across_rows && !layers_.empty() && layers_[0].across_q.count > 0)
        throw std::logic_error("there are no encoder states to look at");
}

void Runner::check_rope(const Work& work, const Rope& rope) const {
    const auto there = [&](int64_t row) { return row >= 0 && row < rope.rows; };
    bool all = rope.dim <= model_.head_dim;
    for (int64_t feed = 0; !rope.row && feed < work.feeds; ++feed)
        all = all && there(work.starts[feed]) && there(work.starts[feed] + work.counts[feed] - 1);
    if (!all || (rope.row && !std::all_of(rope.row, rope.row + work.tokens, there)))
        throw std::logic_error("a position is not in its table");
}

// Its threads are not in this process: it is neither asked to end nor waited for, and never freed.
void Runner::forget_lost_crew() {
    if (!crew_ || !crew_->lost()) return;
    ahead_.reset();
    static_cast<void>(crew_.release());
}

void Runner::start_crew(int threads) {
    if (!crew_ || crew_->size() != threads) crew_ = std::make_unique<Crew>(threads);
    scratch_.resize(threads);
}

void Runner::run(const Work& work, int threads) {
    check(work);
    forget_lost_crew();
    const Cores::Turn turn(threads);
    if (!was_ahead(work, threads)) {
        list_wanted(work);
        start_crew(threads);
        for (int64_t i = 0; i < work.copies; ++i) pages_.copy(work.copy_from[i], work.copy_to[i]);
        if (model_.both_ways) return run_both_ways(work);
        for (int64_t begin = 0; begin < work.tokens; begin += kMostTokens)
            run_part(make_part(work, begin));
        if (work.early_rows) read_early(work);
    }
    if (work.ahead && !turn.is_crowded()) run_ahead(work);
}

void Runner::reserve(int64_t pages, int64_t across) {
    if (pages <= pages_.count() && across <= across_.count()) return;
    give_up_ahead();
    if (pages > pages_.count()) pages_.reserve(pages);
    if (across > across_.count()) across_.reserve(across);
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
                if (work.best_logits) one.logits = work.best_logits + best * model_.vocabulary;
                if (work.best_totals) one.total = work.best_totals + best;
                if (work.best_hidden) one.hidden = work.best_hidden + best * model_.width;
                ++best;
            }
            wanted_.push_back(one);
        }
    }
}

Runner::Part Runner::make_part(const Work& work, int64_t begin) const {
    Part part{work, begin, std::min(begin + kMostTokens, work.tokens), model_.both_ways ? begin : 0};
    const int64_t together = std::max<int64_t>(1, kMostQueries / group());
    int64_t offset = 0, kept = 0;
    for (int64_t feed = 0; feed < work.feeds; offset += work.counts[feed++]) {
        const int64_t from = std::max(offset, part.begin);
        const int64_t to = std::min(offset + work.counts[feed], part.end);
        if (from < to) part.stretches.push_back({feed, from - part.begin, to - from, from - offset, kept});
        if (work.states_kept) kept += work.states_kept[feed];
        for (int64_t token = from; token < to; ++token) {
            part.row_of.push_back(work.rows[feed]);
            part.position_of.push_back(work.starts[feed] + token - offset);
            part.feed_of.push_back(feed);
        }
        for (int64_t token = from; token < to; token += together)
            part.tiles.push_back({feed, work.rows[feed], token - part.begin,
                                  std::min(together, to - token), work.starts[feed] + token - offset,
                                  work.starts[feed] + work.counts[feed]});
    }
    part.uses = Uses(work, part.begin, part.end);
    limit(part, part.own);
    if (work.across_rows) limit(part, part.across);
    const auto place = [&](int64_t token) {
        const auto before = [](const Wanted& one, int64_t at) { return one.token < at; };
        return std::lower_bound(wanted_.begin(), wanted_.end(), token, before) - wanted_.begin();
    };
    part.wanted_begin = place(part.begin);
    part.wanted_end = place(part.end);
    return part;
}

// How far the queries of a part see, and who works on it.
void Runner::limit(const Part& part, Sight& sight) const {
    for (const Tile& tile : part.tiles)
        sight.spans = std::max(sight.spans, last_seen(part, tile, tile.count - 1, sight) / kSpan + 1);
    sight.spread = sight.spans > 1 && int64_t(part.tiles.size()) == part.tokens() &&
                   items(part) < 4 * crew_->size();
}

// There is room for so many tokens at once, and for hidden states and queries of `all`; what was held
// may be lost.
void Runner::fit(int64_t rows, int64_t all) {
    for (InputBuffer* buffer : {&normed_, &mixed_, &inner_, &last_}) buffer->fit(rows);
    const auto grow = [](std::vector<float>& values, int64_t size) {
        if (int64_t(values.size()) < size) values = std::vector<float>(size);
    };
    grow(added_, rows * model_.width);
    grow(hidden_, all * model_.width);
    grow(qkv_, all * qkv_width());
    if (!model_.states) return;
    sizes_.fit(rows);
    grow(entering_, rows * 2 * model_.inner);
    grow(selected_, rows * (model_.rank + 2 * model_.states));
}

void Runner::make_room(const Part& part) {
    if (!model_.both_ways) fit(part.tokens(), part.tokens());
    const int64_t spans = std::max(part.own.spans, part.across.spans);
    int64_t room = spans * seen_size() + kMostQueries * whole_vectors(model_.head_dim);
    if (model_.states) room = std::max(room, (part.tokens() + model_.states) * kPanel);
    for (const Layer& layer : layers_) {
        if (layer.experts.count == 0) continue;
        const int64_t places = Routing::most_places(layer.experts, part.tokens());
        routing_.expect(layer.experts, part.tokens());
        inputs_of_experts_.fit(places);
        inner_of_experts_.fit(places);
        room = std::max(room, part.tokens() * kPanel);
    }
    room = std::max(room, 2 * PanelChanges::room_for(part.uses.slots()));
    if (int64_t(reduced_.size()) < reduced_size(part.uses)) reduced_.resize(reduced_size(part.uses));
    for (InputBuffer* buffer : {&turned_normed_, &turned_mixed_, &turned_inner_}) {
        buffer->fit(part.uses.most_turned());
        buffer->expect(1);
    }
    for (std::vector<float>& scratch : scratch_)
        if (int64_t(scratch.size()) < room) scratch.resize(room * 3 / 2);
    if (part.own.spread || part.across.spread)
        spread_.resize(items(part) * spans * seen_size());
    for (InputBuffer* buffer : {&normed_, &mixed_, &inner_, &sizes_}) buffer->expect(part.tokens());
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
    for (int64_t slice = std::max<int64_t>(0, from - model_.layers); slice < part.slices; ++slice) {
        if (!crew_->pass(member, model_.layers + slice)) return;
        finish(member, part, slice);
    }
}

void Runner::embed(Member& member, const Part& part) {
    crew_->share(member, part.tokens(), [&](int64_t token) {
        embed_token(part, token);
        before_attention(part, token, 0);
    });
}

void Runner::embed_token(const Part& part, int64_t token) {
    float* to = hidden(part, token);
    read_token(part, token, to);
    if (model_.positions) {
        const int32_t* given = part.work.positions;
        const int64_t position = given ? given[part.begin + token] : part.position_of[token];
        add_to(to, model_.positions + position * model_.width, model_.width);
    }
    if (model_.embed_norm.weight)
        normalise(static_cast<NormKind>(model_.norm_kind), to, model_.width, model_.eps,
                  model_.embed_norm, to);
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

void Runner::norm_row(const Part& part, int64_t row, const Norm& norm, bool coded) {
    const float* from = hidden(part, row);
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
            std::copy_n(hidden(part, row), model_.width,
                        work.early_hidden + (i * work.tokens + part.begin + row) * model_.width);
    if (index > 0 && index <= work.deep_layers) add_features(part, row, index - 1);
    if (index < model_.layers && !model_.both_ways) enter(part, row, index);
}

void Runner::enter(const Part& part, int64_t row, int64_t index) {
    const Layer& layer = layers_[index];
    const bool coded = reads_codes(layer.qkv) || reads_codes(layer.recurrence.inward) ||
                       (shares_norm(layer) && mlp_reads_[index].codes);
    norm_row(part, row, layer.attention, coded);
}

// What a layer's hidden states are given besides, by whoever feeds the position.
void Runner::add_features(const Part& part, int64_t row, int64_t index) {
    const Work& work = part.work;
    for (int64_t i = 0; i < work.deep; ++i) {
        const Embeds& given = work.added[i];
        const int64_t at = part.begin + row - given.offset;
        if (at >= 0 && at < given.count)
            add_to(hidden(part, row),
                   given.values + (at * work.deep_layers + index) * model_.width, model_.width);
    }
}

void Runner::before_mlp(const Part& part, int64_t row, int64_t index) {
    const Layer& layer = layers_[index];
    if (!shares_norm(layer)) norm_row(part, row, layer.mlp, mlp_reads_[index].codes);
}

void Runner::run_layer(Member& member, const Part& part, int64_t index) {
    if (layers_[index].recurrence.inward.count > 0) return recur(member, part, index);
    make_queries(member, part, index);
    mix(member, part, index);
}

// Queries, and keys and values in their pages.
void Runner::make_queries(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const PanelItems items(layer.qkv, part.tokens(), crew_->size());
    reduce(member, part, index, kByQkv);
    PanelChanges changes = changes_of(member, part, index, kQkv);
    share_then(
        member, items.count(), part.tokens(),
        [&](int64_t item) {
            items.write(item, normed_.inputs(), changes, [&](int64_t row) { return qkv(part, row); });
        },
        [&](int64_t row) {
            place(part, index, row);
            // Nothing reads what attention reads any more, and the layer's input is still there.
            if (model_.parallel) before_mlp(part, row, index);
        });
}

// What queries see, and what an MLP makes of it.
void Runner::mix(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const bool looks_across = layer.across_q.count > 0;
    attend_all(member, part, part.own, index);
    reduce(member, part, index, kByOut);
    add_output(member, part, layer.out, mixed_, changes_of(member, part, index, kOut),
               layer.attention_post, [&](int64_t row) {
                   if (looks_across) {
                       return norm_row(part, row, layer.across, reads_codes(layer.across_q));
                   }
                   if (!model_.parallel) before_mlp(part, row, index);
               });
    if (looks_across) look_across(member, part, index);
    if (layer.experts.count > 0) return run_experts(member, part, index);
    expand(member, part, index);
    reduce(member, part, index, kByDown);
    add_output(member, part, layer.dense.down, inner_, changes_of(member, part, index, kDown),
               layer.mlp_post, [&](int64_t row) { before_attention(part, row, index + 1); });
}

void Runner::look_across(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const PanelItems items(layer.across_q, part.tokens(), crew_->size());
    crew_->share(member, items.count(), [&](int64_t item) {
        items.write(item, normed_.inputs(), [&](int64_t row) { return qkv(part, row); });
    });
    attend_all(member, part, part.across, index);
    add_output(member, part, layer.across_out, mixed_, {}, layer.across_post,
               [&](int64_t row) { before_mlp(part, row, index); });
}

// What was made for a row comes to it, normalised, or the sum is normalised that it came to.
void Runner::after_sum(const Part& part, int64_t row, const Norm& post) {
    if (!post.weight) return;
    const int64_t width = model_.width;
    float* to = is_added_later(post) ? added_.data() + row * width : hidden(part, row);
    normalise(static_cast<NormKind>(model_.norm_kind), to, width, model_.eps, post, to);
    if (is_added_later(post)) add_to(hidden(part, row), to, width);
}

}  // namespace everystep
