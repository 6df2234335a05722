// One engine step on the processor: all layers of a stack over all that is fed, in one call.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "crew.h"
#include "experts.h"
#include "guess.h"
#include "head.h"
#include "linear.h"
#include "model.h"
#include "panel.h"
#include "uses.h"

namespace everystep {

// Rows of inputs to a product with room for their codes.
class InputBuffer {
  public:
    InputBuffer(int64_t rows, int64_t columns);
    // There is room for so many rows; what they held may be lost.
    void fit(int64_t rows);
    float* row(int64_t i) { return values_.data() + i * inputs_.columns; }
    const Inputs& inputs() const { return inputs_; }
    // So many rows come next: few of them lie as close together as they can.
    void expect(int64_t rows) { inputs_.together = std::clamp<int64_t>(rows, 1, kTogether); }

  private:
    std::vector<float> values_, scales_, sums_;
    std::vector<int8_t> codes_;
    std::vector<int32_t> offsets_, firsts_;
    int64_t rows_ = 0;
    Inputs inputs_;
};

// In which forms the first products of an MLP read their inputs.
struct Reads {
    bool codes, values;
};

// Consecutive tokens of one feed, whose queries of one key head are computed together. `seen`: how many
// positions a query sees that sees all of its row.
struct Tile {
    int64_t feed, row, token, count, position, seen;
};

// Consecutive tokens of one feed in a part: from its position `first` on. `kept`: where its pages begin
// among those for states.
struct Stretch {
    int64_t feed, token, count, first, kept;
};

// What queries look at: keys and values of their own rows, or those of encoder states. `spans`: of the
// longest. `spread`: there are so few queries that spans are shared among members.
struct Sight {
    bool across;
    int64_t spans;
    bool spread;
};

class Runner {
  public:
    // std::invalid_argument where a phase could not read the matrices as they are joined.
    Runner(const Model& model, KvType type);
    ~Runner() { give_up_ahead(); }

    // `threads`: how many members the crew has from now on. std::out_of_range where an id is not one,
    // std::logic_error where a row is said to lie in pages that there are not, std::system_error where
    // threads cannot be made. Nothing is lost then, and rows that are not fed hold what they held.
    void run(const Work& work, int threads);

    // Writes (rows, vocabulary) logits of (rows, width) hidden states after the last norm, bit for bit
    // those of their step. It runs on the caller's thread in memory of its own: others may be ahead.
    void read_out(const float* hidden, int64_t rows, float* logits) const;

    // There are at least so many pages, and so many of encoder states.
    void reserve(int64_t pages, int64_t across);

    // The pages of encoder states, of which the numbers are given, hold what every layer makes of
    // (count, width) states. Exceptions are those of `run`.
    void keep_states(const float* states, int64_t count, const int32_t* numbers, int threads);

    // Nothing is computed until the next work.
    void give_up_ahead();
    const Guess& guess() const { return guess_; }

    // How many experts were read in all layers and parts of works, what was begun ahead included.
    int64_t experts_read() const { return routing_.num_read(); }

    // The states in a page, (layers, kernel - 1 + states, inner).
    float* states_in(int32_t page) const { return reinterpret_cast<float*>(pages_.data()[page]); }
    int64_t states_size() const {
        return model_.states ? (model_.kernel - 1 + model_.states) * model_.inner : 0;
    }

    int64_t all_states() const { return model_.layers * states_size(); }

    // Calls `use(keys, position, key, value)` for a row's first positions, in every layer and head,
    // with the places of its key and value in (layers, 2, kv_heads, length, head_dim). `across`: of
    // encoder states in place of a row.
    template <class Use>
    void each_cached(const int32_t* numbers, int64_t length, bool across, Use use) const;

  private:
    static constexpr int64_t kMostTokens = 264, kFewRows = 2, kSlices = 8;

    // A part of a work that fits into the buffers: tokens [begin, end). Hidden states and queries of
    // its first token lie in row `first` of theirs. The head is read in `slices`, between which the
    // caller can come in.
    struct Part {
        const Work& work;
        int64_t begin, end, first, slices = 1;
        Sight own{false, 1, false}, across{true, 1, false};
        std::vector<Stretch> stretches;
        std::vector<Tile> tiles;
        std::vector<int64_t> row_of;       // per token
        std::vector<int64_t> position_of;  // per token
        std::vector<int64_t> feed_of;      // per token
        int64_t wanted_begin, wanted_end;
        Uses uses;
        int64_t tokens() const { return end - begin; }
    };
    // `heads` query heads from `first` on, which read one key head.
    struct Item {
        const Tile& tile;
        int64_t head, first, heads;
    };
    using Member = Crew::Member;

    void list_wanted(const Work& work);
    Part make_part(const Work& work, int64_t begin) const;
    void limit(const Part& part, Sight& sight) const;
    void run_part(const Part& part);
    void run_both_ways(const Work& work);
    template <class Pass>
    void run_pass(const std::vector<Part>& parts, Pass pass);
    void fit(int64_t rows, int64_t all);
    void make_room(const Part& part);
    void check(const Work& work) const;
    void check_states(const Work& work) const;
    void check_uses(const Work& work) const;
    void check_rope(const Work& work, const Rope& rope) const;
    void start_crew(int threads);
    void forget_lost_crew();
    bool can_go_on(const Work& work) const;
    void run_ahead(const Work& work);
    void start_ahead(const Work& next);
    bool was_ahead(const Work& work, int threads);
    void run_layers(Member& member, const Part& part, int64_t from);
    void embed(Member& member, const Part& part);
    void embed_token(const Part& part, int64_t token);
    void read_token(const Part& part, int64_t token, float* to) const;
    void run_layer(Member& member, const Part& part, int64_t index);
    void make_queries(Member& member, const Part& part, int64_t index);
    void mix(Member& member, const Part& part, int64_t index);
    void look_across(Member& member, const Part& part, int64_t index);
    void reduce(Member& member, const Part& part, int64_t index, ReadOf read);
    static int64_t reduced_size(const Uses& uses);
    void reduce_down(Member& member, const Part& part, int64_t index, ReadOf read);
    void turn(Member& member, const Part& part, int64_t index, ReadOf read, const TurnedRows& turned);
    void fold(Member& member, const Part& part, int64_t index, ReadOf read, const TurnedRows& turned);
    void reduce_turned(Member& member, const Part& part, int64_t index, ReadOf read,
                       const TurnedRows& turned);
    PanelChanges changes_of(const Member& member, const Part& part, int64_t index, ChangedMap map);
    const Linear& map_of(int64_t index, ChangedMap map) const;
    InputBuffer& inputs_by(ReadOf read) {
        return read == kByOut ? mixed_ : read == kByDown ? inner_ : normed_;
    }
    InputBuffer& turned_by(ReadOf read) {
        return read == kByOut ? turned_mixed_ : read == kByDown ? turned_inner_ : turned_normed_;
    }
    // What a use reads of a stretch of rows.
    const float* given_to(const Part& part, ReadOf read, const TurnedRows& turned, int64_t use,
                          int64_t stretch);
    void recur(Member& member, const Part& part, int64_t index);
    void convolve(const Part& part, int64_t index, int64_t block);
    void convolve_token(const Part& part, const Stretch& stretch, int64_t index, int64_t t, int64_t block);
    void keep_inputs(const Part& part, const Stretch& stretch, int64_t index, int64_t column, int count);
    void scan(const Part& part, int64_t index, int64_t block, float* room);
    void scan_stretch(const Part& part, const Stretch& stretch, int64_t index, int64_t column, int count,
                      const float* sizes, float* states);
    const float* states_before(const Part& part, const Stretch& stretch, int64_t index) const;
    const float* input_at(const Part& part, const Stretch& stretch, int64_t index, int64_t t) const;
    template <class Use>
    void each_kept(const Part& part, const Stretch& stretch, int64_t index, Use use) const;
    float* entering(int64_t row) { return entering_.data() + row * 2 * model_.inner; }
    const float* entering(int64_t row) const { return entering_.data() + row * 2 * model_.inner; }
    float* selected(int64_t row) {
        return selected_.data() + row * (model_.rank + 2 * model_.states);
    }
    void finish(Member& member, const Part& part, int64_t slice);
    void norm_last(Member& member, const Part& part);
    void read_early(const Work& work);
    template <class From, class EachGroup>
    void read_rows(int64_t rows, From from, float cap, float* logits, EachGroup each_group) const;
    int64_t head_groups() const { return (model_.vocabulary + Head::kColumns - 1) / Head::kColumns; }
    template <class Place>
    void head_columns(int64_t group, const Inputs& in, int64_t rows, float cap, Place place) const;
    void put_before_head(const float* from, InputBuffer& in, int64_t row) const;
    void norm_heads(const Norm& norm, float* heads, int64_t count) const;
    void place(const Part& part, int64_t layer, int64_t token);
    void report_all(Member& member, const Part& part, const Sight& sight, int64_t layer);
    void report_weights(const Part& part, const Sight& sight, int64_t layer, int64_t token, int64_t head,
                        float* out) const;
    void attend_all(Member& member, const Part& part, const Sight& sight, int64_t layer);
    Item item_of(const Part& part, int64_t number) const;
    int64_t first_seen(const Tile& tile, int64_t token, const Sight& sight, int64_t layer) const;
    int64_t last_seen(const Part& part, const Tile& tile, int64_t token, const Sight& sight) const;
    Queries queries_of(const Part& part, const Item& item, const Sight& sight, int64_t layer,
                       float* scaled) const;
    Keys keys_of(const int32_t* numbers, int64_t layer, int64_t head, bool across = false) const;
    Keys keys_of(const Part& part, const Item& item, const Sight& sight, int64_t layer) const;
    const int32_t* numbers_of(const Part& part, int64_t row) const {
        return part.work.pages + row * part.work.stride;
    }
    void attend_span(const Keys& keys, const Queries& queries, int64_t span, float* seen) const;
    void conclude_item(const Part& part, const Item& item, const Sight& sight, int64_t layer,
                       float* seen);
    void expand(Member& member, const Part& part, int64_t layer);
    void expand_block(const Mlp& mlp, const Inputs& in, int64_t rows, const Inputs& to, int64_t block,
                      bool valued, PanelChanges& gate, PanelChanges& up) const;
    template <int M>
    void inner_values(const Mlp& mlp, const Inputs& in, int64_t first, int64_t place, int64_t row,
                      const PanelChanges& gate, const PanelChanges& up, simd::Floats (&out)[M]) const;
    void run_experts(Member& member, const Part& part, int64_t index);
    void route(Member& member, int64_t rows, int64_t index);
    void gather(const ChosenExpert& one, int64_t index);
    Inputs read_by(const ChosenExpert& one, int64_t rows) const;
    Inputs inner_of(const Mlp& expert, const ChosenExpert& one) const;
    void add_experts(const Experts& experts, const Part& part, int64_t panel, const Norm& post,
                     float* sums);
    bool is_added_later(const Norm& post) const { return post.weight && !model_.norms_sums; }
    void after_sum(const Part& part, int64_t row, const Norm& post);
    bool shares_norm(const Layer& layer) const { return model_.parallel && !layer.mlp.weight; }
    float* hidden(const Part& part, int64_t row) {
        return hidden_.data() + (part.first + row) * model_.width;
    }
    int64_t qkv_width() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }
    float* qkv(const Part& part, int64_t row) { return qkv_.data() + (part.first + row) * qkv_width(); }
    const float* qkv(const Part& part, int64_t row) const {
        return qkv_.data() + (part.first + row) * qkv_width();
    }
    void norm_row(const Part& part, int64_t row, const Norm& norm, bool coded);
    void enter(const Part& part, int64_t row, int64_t layer);
    void before_attention(const Part& part, int64_t row, int64_t layer);
    void add_features(const Part& part, int64_t row, int64_t layer);
    void before_mlp(const Part& part, int64_t row, int64_t layer);
    template <class Then>
    void add_output(Member& member, const Part& part, const Linear& linear, const InputBuffer& in,
                    PanelChanges changes, const Norm& post, Then each_row);
    template <class Work, class Then>
    void share_then(Member& member, int64_t items, int64_t rows, Work work, Then each_row);
    int64_t group() const { return model_.kv_heads ? model_.heads / model_.kv_heads : 1; }
    int64_t group_tiles() const;
    int64_t items(const Part& part) const;
    int64_t seen_size() const { return kMostQueries * Seen::size(whole_vectors(model_.head_dim)); }

    const Model model_;
    const std::vector<Layer> layers_;
    const PageShape shape_;
    Pages pages_, across_;
    std::unique_ptr<Crew> crew_;
    std::vector<float> hidden_, qkv_, added_, entering_, selected_, reduced_;
    std::vector<Wanted> wanted_;  // in the order of tokens
    Head head_;
    InputBuffer normed_, mixed_, inner_, last_;
    InputBuffer turned_normed_, turned_mixed_, turned_inner_;
    std::vector<Reads> mlp_reads_;  // per layer
    Routing routing_;               // of the layer that is being computed
    InputBuffer inputs_of_experts_, inner_of_experts_, sizes_;
    std::vector<float> spread_;
    std::vector<std::vector<float>> scratch_;
    Guess guess_;
    std::optional<Part> ahead_;  // of the guess that is being computed
};

// Work that is shared, then what is done to whole rows of its results: by all members, or, where rows
// are few, by the last that arrives.
template <class Work, class Then>
void Runner::share_then(Member& member, int64_t items, int64_t rows, Work work, Then each_row) {
    if (rows > kFewRows) {
        crew_->share(member, items, work);
        crew_->share(member, rows, each_row);
        return;
    }
    crew_->share(member, items, work, [&] {
        for (int64_t row = 0; row < rows; ++row) each_row(row);
    });
}

// What a linear map makes comes to hidden states.
template <class Then>
void Runner::add_output(Member& member, const Part& part, const Linear& linear, const InputBuffer& in,
                        PanelChanges changes, const Norm& post, Then each_row) {
    const bool later = is_added_later(post);
    const PanelItems items(linear, part.tokens(), crew_->size());
    share_then(
        member, items.count(), part.tokens(),
        [&](int64_t item) {
            const auto add = [&](int64_t row, int64_t column, simd::Floats x, int count) {
                float* to = later ? added_.data() + row * model_.width : hidden(part, row);
                write(to + column, later ? x : simd::add(read(to + column, count), x), count);
            };
            items.multiply(item, in.inputs(), changes, add);
        },
        [&](int64_t row) {
            after_sum(part, row, post);
            each_row(row);
        });
}

template <class Use>
void Runner::each_cached(const int32_t* numbers, int64_t length, bool across, Use use) const {
    const int64_t plane = length * shape_.dim;
    for (int64_t layer = 0; layer < model_.layers; ++layer)
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
            const int64_t key = (layer * 2 * shape_.kv_heads + head) * plane;
            const Keys keys = keys_of(numbers, layer, head, across);
            for (int64_t at = 0; at < length; ++at)
                use(keys, at, key + at * shape_.dim, key + shape_.kv_heads * plane + at * shape_.dim);
        }
}

}  // namespace everystep
