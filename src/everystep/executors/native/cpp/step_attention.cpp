// The phase of a step in which queries meet keys: who attends to what, and in which order it is joined.
#include <algorithm>

#include "rows.h"
#include "step.h"

namespace everystep {

int64_t Runner::group_tiles() const {
    return (group() + kMostQueries - 1) / kMostQueries;
}

int64_t Runner::items(const Part& part) const {
    return int64_t(part.tiles.size()) * model_.kv_heads * group_tiles();
}

// Normalises heads that lie side by side, each by itself or as a whole, where there is such a norm.
void Runner::norm_heads(const Norm& norm, float* heads, int64_t count) const {
    if (!norm.weight) return;
    const int64_t size = model_.whole_qk ? count * model_.head_dim : model_.head_dim;
    for (float* at = heads; at < heads + count * model_.head_dim; at += size)
        normalise(static_cast<NormKind>(model_.norm_kind), at, size, model_.eps, norm, at);
}

// Turns a token's queries and keys, and writes its keys and values into their page.
void Runner::place(const Part& part, int64_t index, int64_t token) {
    const Layer& layer = layers_[index];
    const int64_t dim = model_.head_dim, turning = model_.heads + model_.kv_heads;
    float* qkv = this->qkv(part, token);
    norm_heads(layer.q, qkv, model_.heads);
    norm_heads(layer.k, qkv + model_.heads * dim, model_.kv_heads);
    for (int64_t head = 0; head < turning; ++head) {
        float* at = qkv + head * dim;
        if (layer.rope < 0) continue;
        const Rope& rope = part.work.rope[layer.rope];
        const int64_t row =
            rope.row ? rope.row[part.begin + token] : part.position_of[token];
        rotate(at, rope.dim, rope.cos + row * rope.dim, rope.sin + row * rope.dim);
    }
    const int32_t* numbers = numbers_of(part, part.row_of[token]);
    for (int64_t head = 0; head < model_.kv_heads; ++head)
        write_position(keys_of(numbers, index, head), part.position_of[token],
                       qkv + (model_.heads + head) * dim, qkv + (turning + head) * dim);
}

// An item is a tile and a few query heads of one key head.
Runner::Item Runner::item_of(const Part& part, int64_t number) const {
    const int64_t tiles = group_tiles();
    const int64_t head = number / tiles % model_.kv_heads, first = number % tiles * kMostQueries;
    return {part.tiles[number / (tiles * model_.kv_heads)], head, head * group() + first,
            std::min<int64_t>(kMostQueries, group() - first)};
}

int64_t Runner::first_seen(const Tile& tile, int64_t token, const Sight& sight, int64_t index) const {
    const int64_t window = sight.across ? 0 : layers_[index].window;
    return window ? std::max<int64_t>(0, tile.position + token - window + 1) : 0;
}

int64_t Runner::last_seen(const Part& part, const Tile& tile, int64_t token, const Sight& sight) const {
    if (sight.across) return part.work.across_counts[tile.feed] - 1;
    return model_.both_ways ? tile.seen - 1 : tile.position + token;
}

Queries Runner::queries_of(const Part& part, const Item& item, const Sight& sight, int64_t index,
                           float* scaled) const {
    const int64_t dim = model_.head_dim, apart = whole_vectors(dim);
    const bool near = model_.distances && !sight.across;
    const float scale = model_.scale * layers_[index].factor;
    Queries queries;
    queries.count = int(item.tile.count * item.heads);
    queries.values = scaled;
    queries.softcap = model_.softcap;
    queries.reach = model_.reach;
    queries.fetch = item.tile.count == 1;
    for (int64_t i = 0; i < queries.count; ++i) {
        const int64_t token = i / item.heads, head = item.first + i % item.heads;
        const float* q = qkv(part, item.tile.token + token) + head * dim;
        for (int64_t d = 0; d < dim; ++d) scaled[i * apart + d] = q[d] * scale;
        queries.at[i] = item.tile.position + token;
        queries.last[i] = last_seen(part, item.tile, token, sight);
        queries.first[i] = first_seen(item.tile, token, sight, index);
        queries.distances[i] = near ? model_.distances + head * (2 * model_.reach + 1) : nullptr;
    }
    return queries;
}

Keys Runner::keys_of(const int32_t* numbers, int64_t index, int64_t head, bool across) const {
    const Pages& pages = across ? across_ : pages_;
    // An encoder is done with a layer's keys before it comes to the next layer.
    const int64_t layer = model_.both_ways ? 0 : index;
    return {pages.data(), numbers, layer * shape_.layer() + head * shape_.head(), shape_};
}

Keys Runner::keys_of(const Part& part, const Item& item, const Sight& sight, int64_t index) const {
    const Work& work = part.work;
    const int32_t* numbers = sight.across ? work.across_pages + work.across_rows[item.tile.feed] * work.across_stride
                                          : numbers_of(part, item.tile.row);
    return keys_of(numbers, index, item.head, sight.across);
}

// Writes what queries see of a span of their row to its place in `seen`; the next span most likely is
// the same member's.
void Runner::attend_span(const Keys& keys, const Queries& queries, int64_t span, float* seen) const {
    const int64_t last = queries.last_seen();
    const bool more = queries.fetch && span < last / kSpan;
    attend(keys, queries, span, {seen + span * seen_size(), whole_vectors(model_.head_dim)},
           more ? Ahead(keys, (span + 1) * kSpanPages, last / kPagePositions) : Ahead());
}

void Runner::conclude_item(const Part& part, const Item& item, const Sight& sight, int64_t index,
                           float* seen) {
    const int64_t dim = model_.head_dim, width = whole_vectors(dim);
    for (int64_t i = 0; i < item.tile.count * item.heads; ++i) {
        const int64_t token = i / item.heads, last = last_seen(part, item.tile, token, sight);
        const int64_t first = first_seen(item.tile, token, sight, index) / kSpan;
        conclude({seen + first * seen_size() + i * Seen::size(width), width}, last / kSpan - first + 1,
                 seen_size(), dim,
                 mixed_.row(item.tile.token + token) + (item.first + i % item.heads) * dim);
    }
}

void Runner::attend_all(Member& member, const Part& part, const Sight& sight, int64_t index) {
    report_all(member, part, sight, index);
    const int64_t items = this->items(part), rows = part.tokens();
    const bool coded = reads_codes(sight.across ? layers_[index].across_out : layers_[index].out);
    const auto code = [&](int64_t row) {
        if (coded) quantise_row(mixed_.inputs(), row);
    };
    float* own = scratch_[member.index].data();
    float* scaled = own + sight.spans * seen_size();
    if (!sight.spread) {
        const auto whole = [&](int64_t number) {
            const Item item = item_of(part, number);
            const Queries queries = queries_of(part, item, sight, index, scaled);
            const Keys keys = keys_of(part, item, sight, index);
            for (int64_t span = queries.first_seen() / kSpan; span <= queries.last_seen() / kSpan; ++span)
                attend_span(keys, queries, span, own);
            conclude_item(part, item, sight, index, own);
        };
        if (coded) return share_then(member, items, rows, whole, code);
        return crew_->share(member, items, whole);
    }
    const auto seen_by = [&](int64_t number) {
        return spread_.data() + number * sight.spans * seen_size();
    };
    share_then(
        member, items * sight.spans, rows,
        [&](int64_t place) {
            const int64_t number = place / sight.spans, span = place % sight.spans;
            const Item item = item_of(part, number);
            const Queries queries = queries_of(part, item, sight, index, scaled);
            if (span < queries.first_seen() / kSpan || span > queries.last_seen() / kSpan) return;
            attend_span(keys_of(part, item, sight, index), queries, span, seen_by(number));
        },
        // Where spans are spread, every row is a tile.
        [&](int64_t row) {
            for (int64_t number = row * items / rows; number < (row + 1) * items / rows; ++number)
                conclude_item(part, item_of(part, number), sight, index, seen_by(number));
            code(row);
        });
}

}  // namespace everystep
