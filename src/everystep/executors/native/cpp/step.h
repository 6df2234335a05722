// One engine step on the processor: all layers of a decoder over all that is fed, in one call.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "crew.h"
#include "linear.h"
#include "model.h"

namespace everystep {

// Memory for pages, a slab at a time, so that pages never move.
class Pages {
  public:
    explicit Pages(int64_t floats) : floats_(floats) {}
    void reserve(int64_t count);
    void copy(int64_t from, int64_t to);
    float* const* data() const { return pages_.data(); }
    int64_t count() const { return int64_t(pages_.size()); }

  private:
    struct Freed {
        void operator()(void* p) const { std::free(p); }
    };
    const int64_t floats_;
    std::vector<float*> pages_;
    std::vector<std::unique_ptr<void, Freed>> slabs_;
};

// Rows of inputs to a product with room for their codes.
class InputBuffer {
  public:
    InputBuffer(int64_t rows, int64_t columns);
    float* row(int64_t i) { return values_.data() + i * inputs_.columns; }
    const Inputs& inputs() const { return inputs_; }

  private:
    std::vector<float> values_, scales_;
    std::vector<int8_t> codes_;
    std::vector<int32_t> sums_;
    Inputs inputs_;
};

// Consecutive tokens of one feed, whose queries of one key head are computed together.
struct Tile {
    int64_t row, token, count, position;
};

class Runner {
  public:
    explicit Runner(const Model& model);

    // `threads`: how many members the crew has from now on. std::out_of_range where an id is not one.
    void run(const Work& work, int threads);
    Pages& pages() { return pages_; }

    // Calls `use(place, in_page)` for every number of a row's first positions: where it stands in
    // (layers, 2, kv_heads, length, head_dim), and where in memory.
    template <class Use>
    void each_cached(const int32_t* numbers, int64_t length, Use use) const;

  private:
    static constexpr int64_t kMostTokens = 256;

    // A part of a work that fits into the buffers: tokens [begin, end).
    struct Part {
        const Work& work;
        int64_t begin, end;
        std::vector<Tile> tiles;
        std::vector<int64_t> row_of;       // per token
        std::vector<int64_t> position_of;  // per token
        int64_t wanted_begin, wanted_end;
        int64_t tokens() const { return end - begin; }
    };
    using Member = Crew::Member;

    void list_wanted(const Work& work);
    Part make_part(const Work& work, int64_t begin) const;
    void run_part(const Part& part);
    void embed(Member& member, const Part& part);
    void run_layer(Member& member, const Part& part, int64_t index);
    void attention_block(Member& member, const Part& part, int64_t index);
    void mlp_block(Member& member, const Part& part, int64_t index);
    void finish(Member& member, const Part& part);
    void place(const Part& part, int64_t layer, int64_t token);
    void attend_one(const Part& part, int64_t layer, const Tile& tile, int64_t head, int64_t group,
                    float* scratch);
    void norm_and_code(Member& member, int64_t rows, const Norm& norm, InputBuffer& to, bool coded);
    void code(Member& member, int64_t rows, InputBuffer& of, const Linear& linear);
    void add_output(Member& member, int64_t rows, const Linear& linear, const InputBuffer& in,
                    const Norm& post);
    template <class Use>
    void product(Member& member, const Linear& linear, const Inputs& in, int64_t rows, Use use);
    int64_t group_tiles() const;

    const Model model_;
    const std::vector<Layer> layers_;
    const PageShape shape_;
    Pages pages_;
    std::unique_ptr<Crew> crew_;
    std::vector<float> hidden_, qkv_, added_;
    std::vector<int64_t> wanted_;  // places among the tokens of a work, increasing
    InputBuffer normed_, mixed_, inner_, last_;
    std::vector<std::vector<float>> scratch_;
};

}  // namespace everystep
