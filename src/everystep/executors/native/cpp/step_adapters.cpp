// What adapters do in a step: what is read becomes a few values for each use, and these change the
// outputs of linear maps, panel by panel, before anybody reads them.
#include <algorithm>

#include "rows.h"
#include "step.h"

namespace everystep {

Uses::Uses(const Work& work, int64_t begin, int64_t end) {
    if (!work.use_begins) return;
    slot_of_.assign(end - begin, -1);
    int64_t offset = 0;
    for (int64_t feed = 0; feed < work.feeds; offset += work.counts[feed++]) {
        const int64_t from = std::max(offset, begin), to = std::min(offset + work.counts[feed], end);
        const int64_t first = work.use_begins[feed], last = work.use_begins[feed + 1];
        for (int64_t token = from; token < to && first < last; ++token) {
            slot_of_[token - begin] = slots_;
            for (int64_t i = first; i < last; ++i)
                uses_.push_back({token - begin, slots_, i - first, work.adapter + work.use_adapters[i],
                                 work.use_weights[i]});
            ++slots_;
        }
    }
    std::stable_sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) {
        return a.turn != b.turn ? a.turn < b.turn : a.adapter < b.adapter;
    });
    for (int64_t i = 0, next = 0; i < count(); i = next) {
        const auto together = [&](const Use& one) {
            return one.turn == uses_[i].turn && one.adapter == uses_[i].adapter;
        };
        while (next < count() && next - i < kFewApart && together(uses_[next])) ++next;
        tiles_.push_back({uses_[i].adapter, i, next - i});
        most_ = std::max(most_, uses_[i].adapter->most);
    }
}

int64_t Uses::panels(int64_t index, ReadOf read) const {
    int64_t most = 0;
    for (const UseTile& tile : tiles_)
        most = std::max(most, panels_of(tile.adapter->layer[index].down[read].rows));
    return most;
}

bool Uses::change(int64_t index, ChangedMap map) const {
    return map != kUnchanged && std::any_of(tiles_.begin(), tiles_.end(), [&](const UseTile& tile) {
               return tile.adapter->layer[index].maps[map].count > 0;
           });
}

namespace {

// How many pieces have sums of their own: of what `down` reads, and of what `up` reads. Few uses are
// shared out piece by piece; since pieces do not depend on how many uses there are, no bit does.
constexpr int64_t kPieces = 4, kPiecesOfUp = 2;

}  // namespace

void Runner::check_uses(const Work& work) const {
    if (!work.use_begins) return;
    bool fit = work.use_begins[0] == 0;
    for (int64_t feed = 0; fit && feed < work.feeds; ++feed)
        fit = work.use_begins[feed] <= work.use_begins[feed + 1];
    for (int64_t i = 0; fit && i < work.use_begins[work.feeds]; ++i)
        fit = work.use_adapters[i] >= 0 && work.use_adapters[i] < work.adapters;
    for (int64_t i = 0; fit && i < work.adapters; ++i) fit = work.adapter[i].layers >= model_.layers;
    if (!fit) throw std::logic_error("a feed asks for an adapter that there is not");
}

// Makes of what a map reads what its changes read of it.
void Runner::reduce(Member& member, const Part& part, int64_t index, ReadOf read, const InputBuffer& in) {
    const Uses& uses = part.uses;
    const int64_t panels = uses.empty() ? 0 : uses.panels(index, read);
    if (panels == 0) return;
    const int64_t items = int64_t(uses.tiles().size()) * panels;
    const float* values = in.inputs().values;
    const int64_t columns = in.inputs().columns;
    const auto multiply = [&](int64_t item, int64_t first, int64_t last, auto place) {
        const UseTile& tile = uses.tiles()[item / panels];
        const Matrix& w = tile.adapter->layer[index].down[read];
        const int64_t panel = item % panels;
        if (panel >= panels_of(w.rows)) return;
        const float* rows[kFewApart];
        for (int64_t i = 0; i < tile.count; ++i) rows[i] = values + uses[tile.first + i].row * columns;
        simd::Floats sums[kFewApart];
        each_few(tile.count, [&](auto few, int64_t at) {
            tile_apart(few, w, panel, 1, rows + at, {w.columns, kPieces}, first, last, sums + at);
        });
        for (int64_t i = 0; i < tile.count; ++i)
            simd::store(place(tile.first + i) + panel * kPanel, sums[i]);
    };
    const auto whole = [&](int64_t use) { return reduced_.data() + use * uses.most(); };
    if (items >= 2 * crew_->size() || crew_->size() == 1)
        return crew_->share(member, items, [&](int64_t item) { multiply(item, 0, kPieces, whole); });
    const auto piece_of = [&](int64_t use, int64_t piece) {
        return reduced_.data() + ((1 + piece) * uses.count() + use) * uses.most();
    };
    crew_->share(
        member, items * kPieces,
        [&](int64_t item) {
            const int64_t piece = item % kPieces;
            multiply(item / kPieces, piece, piece + 1, [&](int64_t use) { return piece_of(use, piece); });
        },
        [&] {
            for (int64_t use = 0; use < uses.count(); ++use)
                for (int64_t at = 0; at < panels * kPanel; at += kPanel) {
                    simd::Floats sum = simd::load(piece_of(use, 0) + at);
                    for (int64_t piece = 1; piece < kPieces; ++piece)
                        sum = simd::add(sum, simd::load(piece_of(use, piece) + at));
                    simd::store(whole(use) + at, sum);
                }
        });
}

int64_t Runner::reduced_size(const Uses& uses) { return (1 + kPieces) * uses.count() * uses.most(); }

PanelChanges::PanelChanges(const Uses& uses, int64_t index, ChangedMap map, const Inputs& in,
                           const float* reduced, float* room)
    : uses_(&uses), index_(index), map_(map), in_(&in), reduced_(reduced), room_(room) {
    for (const UseTile& tile : uses.tiles()) {
        const Changes& changes = tile.adapter->layer[index].maps[map];
        for (int64_t i = 0; i < changes.count; ++i) scales_ = scales_ || changes.each[i].gain;
    }
}

// Sums and factors begin as those of no change, and each use in turn changes them.
void PanelChanges::compute(int64_t panel) {
    begin_ = panel, end_ = panel + at_once(uses_->slots());
    const int64_t size = uses_->slots() * kPanel;
    for (int64_t i = begin_; i < end_; ++i) {
        std::fill_n(sums_of(i), size, 0.0f);
        if (scales_) std::fill_n(sums_of(i) + size, size, 1.0f);
    }
    for (const UseTile& tile : uses_->tiles()) {
        const Changes& changes = tile.adapter->layer[index_].maps[map_];
        for (int64_t i = 0; i < changes.count; ++i) change_tile(tile, changes.each[i]);
    }
}

void PanelChanges::change_tile(const UseTile& tile, const Change& change) const {
    using namespace simd;
    const Uses& uses = *uses_;
    const int64_t first = std::max(begin_, change.panel), last = std::min(end_, change.panel + change.panels);
    if (first >= last) return;
    const int64_t panels = last - first, own = first - change.panel;
    const float* rows[kFewApart];
    for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t use = tile.first + i;
        rows[i] = change.first < 0 ? in_->values + uses[use].row * in_->columns
                                   : reduced_ + use * uses.most() + change.first;
    }
    each_few(tile.count, [&](auto few, int64_t at) {
        Floats added[kMostAtOnce * few];
        std::fill_n(added, panels * few, splat(0.0f));
        if (change.up.rows > 0)
            tile_apart(few, change.up, own, panels, rows + at, {change.up.columns, kPiecesOfUp}, 0,
                       kPiecesOfUp, added);
        for (int64_t i = 0; i < panels; ++i)
            for (int m = 0; m < few; ++m) {
                const Use& use = uses[tile.first + at + m];
                float* sum = sums_of(first + i) + use.slot * kPanel;
                Floats more = added[i * few + m], before = load(sum);
                if (change.shift) more = add(more, load(change.shift + (own + i) * kPanel));
                if (change.gain) {
                    float* factor = sum + uses.slots() * kPanel;
                    const Floats gain = load(change.gain + (own + i) * kPanel);
                    const Floats by = fma(gain, splat(use.weight), splat(1.0f));
                    store(factor, mul(load(factor), by));
                    before = mul(before, by);
                }
                store(sum, fma(more, splat(use.weight * change.scale), before));
            }
    });
}

}  // namespace everystep
