// How a row's keys and values lie in pages, and in which type.
//
// A page holds 16 positions of a row, from a multiple of 16 on. Per layer and key head it has the
// keys with positions side by side, (dim, 16), so that a lane is a key and no sum crosses lanes, then
// the values, (16, dim in whole vectors). Codes have 16 scales of keys and 16 of values behind them,
// one per position, so that what stands for a position depends on that position alone.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "model.h"
#include "rows.h"

namespace everystep {

constexpr int64_t kPagePositions = simd::kLanes;

inline int64_t pages_for(int64_t positions) {
    return (positions + kPagePositions - 1) / kPagePositions;
}
inline int64_t whole_vectors(int64_t n) { return (n + simd::kLanes - 1) / simd::kLanes * simd::kLanes; }

// The types that numbers are kept in: how sixteen of them are read and written.
struct Singles {
    using Number = float;
    static constexpr bool kScaled = false;
    static simd::Floats load(const Number* p) { return simd::load(p); }
    static void store(Number* p, simd::Floats a) { simd::store(p, a); }
};
struct Halves {
    using Number = uint16_t;
    static constexpr bool kScaled = false;
    static simd::Floats load(const Number* p) { return simd::load_halves(p); }
    static void store(Number* p, simd::Floats a) { simd::store_halves(p, a); }
};
struct Codes {
    using Number = int8_t;
    static constexpr bool kScaled = true;
    static simd::Floats load(const Number* p) { return simd::load_codes(p); }
    static void store(Number* p, simd::Floats a) { simd::store_bytes(p, simd::round(a)); }
};

// Calls `use` with an object of the class that stands for a type.
template <class Use>
inline void with_type(KvType type, Use use) {
    switch (type) {
        case KvType::kFloat16: return use(Halves{});
        case KvType::kInt8: return use(Codes{});
        default: return use(Singles{});
    }
}

// Sizes in bytes.
struct PageShape {
    int64_t kv_heads, dim;
    KvType type;

    int64_t number() const { return type == KvType::kFloat32 ? 4 : type == KvType::kFloat16 ? 2 : 1; }
    int64_t keys() const { return dim * kPagePositions * number(); }
    int64_t values() const { return kPagePositions * whole_vectors(dim) * number(); }
    int64_t scales() const { return type == KvType::kInt8 ? 2 * kPagePositions * 4 : 0; }
    int64_t head() const { return keys() + values() + scales(); }
    int64_t layer() const { return kv_heads * head(); }
};

// The pages of a row, and where its layer and key head begin in each.
struct Keys {
    uint8_t* const* pages;
    const int32_t* numbers;
    int64_t offset;
    PageShape shape;

    uint8_t* at(int64_t page) const { return pages[numbers[page]] + offset; }
    template <class Type>
    typename Type::Number* keys(int64_t page) const {
        return reinterpret_cast<typename Type::Number*>(at(page));
    }
    template <class Type>
    typename Type::Number* values(int64_t page) const {
        return reinterpret_cast<typename Type::Number*>(at(page) + shape.keys());
    }
    float* key_scales(int64_t page) const {
        return reinterpret_cast<float*>(at(page) + shape.keys() + shape.values());
    }
    float* value_scales(int64_t page) const { return key_scales(page) + kPagePositions; }
};

// What codes of these numbers are multiplied by; NaN where one of them is not finite.
inline float scale_of(const float* x, int64_t size) {
    using namespace simd;
    Floats most = splat(0.0f), nothing = splat(0.0f);
    each_vector(size, [&](int64_t at, int n) {
        const Floats part = read(x + at, n);
        most = max(most, abs(part));
        nothing = fma(part, splat(0.0f), nothing);
    });
    return largest(most) / 127.0f + sum(nothing);
}

// Keeps a head's numbers: calls `use(at, numbers, count)` for every vector, returns their scale.
template <class Type, class Use>
inline float pack_head(const float* x, int64_t dim, Use use) {
    using namespace simd;
    const float scale = Type::kScaled ? scale_of(x, dim) : 1.0f;
    const Floats by = splat(scale == 0 ? 1.0f : scale);
    each_vector(dim, [&](int64_t at, int n) {
        typename Type::Number numbers[kLanes];
        const Floats part = read(x + at, n);
        Type::store(numbers, Type::kScaled ? div(part, by) : part);
        use(at, numbers, n);
    });
    return scale;
}

template <class Type>
inline void write_as(const Keys& to, int64_t position, const float* key, const float* value) {
    const int64_t page = position / kPagePositions, lane = position % kPagePositions;
    const int64_t dim = to.shape.dim;
    auto* keys = to.keys<Type>(page) + lane;
    auto* values = to.values<Type>(page) + lane * whole_vectors(dim);
    const float key_scale = pack_head<Type>(key, dim, [&](int64_t at, const auto* numbers, int n) {
        for (int i = 0; i < n; ++i) keys[(at + i) * kPagePositions] = numbers[i];
    });
    const float value_scale = pack_head<Type>(value, dim, [&](int64_t at, const auto* numbers, int n) {
        std::copy_n(numbers, n, values + at);
    });
    if (!Type::kScaled) return;
    to.key_scales(page)[lane] = key_scale;
    to.value_scales(page)[lane] = value_scale;
}

inline void write_position(const Keys& to, int64_t position, const float* key, const float* value) {
    with_type(to.shape.type, [&](auto type) { write_as<decltype(type)>(to, position, key, value); });
}

template <class Type>
inline void read_as(const Keys& from, int64_t position, float* key, float* value) {
    using namespace simd;
    const int64_t page = position / kPagePositions, lane = position % kPagePositions;
    const int64_t dim = from.shape.dim;
    const Floats key_scale = splat(Type::kScaled ? from.key_scales(page)[lane] : 1.0f);
    const Floats value_scale = splat(Type::kScaled ? from.value_scales(page)[lane] : 1.0f);
    for (int64_t d = 0; d < dim; ++d) {
        float lanes[kLanes];
        store(lanes, mul(Type::load(from.keys<Type>(page) + d * kPagePositions), key_scale));
        key[d] = lanes[lane];
    }
    const auto* values = from.values<Type>(page) + lane * whole_vectors(dim);
    each_vector(dim, [&](int64_t at, int n) {
        write(value + at, mul(Type::load(values + at), value_scale), n);
    });
}

inline void read_position(const Keys& from, int64_t position, float* key, float* value) {
    with_type(from.shape.type, [&](auto type) { read_as<decltype(type)>(from, position, key, value); });
}

// Memory for pages, which a runner gets and gives back when it ends. A little of it is kept for the
// next runner: the system takes milliseconds to make large pages. What it holds is never read before
// it is written.
class Slab {
  public:
    // std::bad_alloc where there is no memory.
    explicit Slab(size_t bytes);
    ~Slab();
    Slab(Slab&& other) noexcept : bytes_(other.bytes_), memory_(std::exchange(other.memory_, nullptr)) {}
    Slab& operator=(Slab&&) = delete;
    void* memory() const { return memory_; }

  private:
    const size_t bytes_;
    void* memory_;
};

// Pages, a slab of them at a time, so that they never move.
class Pages {
  public:
    explicit Pages(int64_t bytes) : bytes_((bytes + 63) / 64 * 64) {}
    void reserve(int64_t count);
    void copy(int64_t from, int64_t to) { std::copy_n(pages_[from], bytes_, pages_[to]); }
    uint8_t* const* data() const { return pages_.data(); }
    int64_t count() const { return int64_t(pages_.size()); }

  private:
    const int64_t bytes_;
    std::vector<uint8_t*> pages_;
    std::vector<Slab> slabs_;
};

}  // namespace everystep
