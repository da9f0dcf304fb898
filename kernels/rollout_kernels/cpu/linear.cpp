// Linear layers, out = x weight^T + bias, or plain products, out = x weight. A row's bits depend on that row of x,
// not on how many there are.
//
// A task computes 64 columns of out, a panel, for a tile of rows, and arranges its part of the weight as it goes.

#include "parallel.h"
#include "product.h"

namespace {

constexpr int kPanel = 64;
constexpr int kStrip = kTileVectors * kLanes;  // columns that a tile of products goes through together

struct Linear {
    const void *x, *weight, *bias;  // x [rows, depth], weight [columns, depth] or plain; bias may be null
    void* out;                      // [rows, columns]
    int64_t rows, columns, depth;
    int plain;  // weight is [depth, columns]
    int threads;
};

// Where column c of a packed panel of `depth` words begins: strips lie one behind the other, each [depth, kStrip].
inline int64_t packed_column(int c, int depth) { return int64_t{c / kStrip} * kStrip * depth + c % kStrip; }

// `depth` words of up to 64 rows of the weight, `stride` elements apart; places behind the last row repeat it.
template <class T>
void pack_rows(const typename T::Element* weight, int64_t stride, int columns, int depth, Word* out) {
    for (int c = 0; c < columns; c += kLanes) {
        const typename T::Element* rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = weight + std::min(c + i, columns - 1) * stride;
        Word* to = out + packed_column(c, depth);
        int word = 0;
        for (; word + kLanes <= depth; word += kLanes) {
            for (int i = 0; i < kLanes; ++i) __builtin_prefetch(rows[i] + word * T::kPerWord + kLanes * stride);
            transpose<T>(rows, word, to + word * kStrip, kStrip);
        }
        for (; word < depth; ++word)
            for (int i = 0; i < kLanes; ++i) to[word * kStrip + i] = T::word(rows[i] + word * T::kPerWord);
    }
}

// The same of a plain weight, whose rows lie `stride` elements apart.
template <class T>
void pack_plain(const typename T::Element* weight, int64_t stride, int columns, int depth, Word* out) {
    using Element = typename T::Element;
    for (int word = 0; word < depth; ++word, weight += T::kPerWord * stride)
        for (int c = 0; c < columns; c += kLanes) {
            const Element *low = weight + c, *high = low + (T::kPerWord - 1) * stride;
            Element ends[2][kLanes] = {};
            if (columns - c < kLanes) {
                std::copy_n(low, columns - c, ends[0]), std::copy_n(high, columns - c, ends[1]);
                low = ends[0], high = ends[1];
            }
            store(out + packed_column(c, depth) + word * kStrip, T::pair(low, high));
        }
}

template <class T>
class Panel {
    using Element = typename T::Element;

  public:
    void begin(const Linear& call) {
        call_ = call;
        panel_.reserve(kTileDepth * kPanel), sums_.reserve(kPanelRows * kPanel);
        if (!T::kInWords) x_.reserve(kPanelRows * kTileDepth);
    }

    void run(int64_t column, int64_t begin) {
        const int rows = static_cast<int>(std::min(kPanelRows, call_.rows - begin));
        const int columns = static_cast<int>(std::min<int64_t>(kPanel, call_.columns - column));
        const int64_t words = call_.depth / T::kPerWord;
        for (int64_t first = 0; first < words; first += kTileDepth) {
            const int depth = static_cast<int>(std::min<int64_t>(kTileDepth, words - first));
            pack(column, columns, first * T::kPerWord, depth);
            const WordMatrix x = left(begin, rows, first * T::kPerWord, depth);
            for (int c = 0; c < columns; c += kStrip)
                product<T>(rows, (std::min(kStrip, columns - c) + kLanes - 1) / kLanes, x,
                           {&panel_[packed_column(c, depth)], kStrip}, {&sums_[c], kPanel}, depth, first > 0);
        }
        for (int r = 0; r < rows; ++r) finish(&sums_[r * kPanel], begin + r, column, columns);
    }

  private:
    // Elements from `first` on of columns of the weight, as words.
    void pack(int64_t column, int columns, int64_t first, int depth) {
        const auto* weight = static_cast<const Element*>(call_.weight);
        if (call_.plain)
            pack_plain<T>(weight + first * call_.columns + column, call_.columns, columns, depth, panel_.data());
        else
            pack_rows<T>(weight + column * call_.depth + first, call_.depth, columns, depth, panel_.data());
    }

    // Elements from `first` on of rows of x, as words: where they lie, or widened.
    WordMatrix left(int64_t begin, int rows, int64_t first, int depth) {
        const Element* x = static_cast<const Element*>(call_.x) + begin * call_.depth + first;
        if constexpr (T::kInWords) return {reinterpret_cast<const Word*>(x), call_.depth / T::kPerWord};
        for (int r = 0; r < rows; ++r) copy_words<T>(x + r * call_.depth, depth, &x_[r * depth]);
        return {x_.data(), depth};
    }

    // A row's sums of a panel, with the bias, into out.
    void finish(const float* sums, int64_t row, int64_t column, int columns) {
        const auto* bias = call_.bias ? static_cast<const Element*>(call_.bias) + column : nullptr;
        Element* out = static_cast<Element*>(call_.out) + row * call_.columns + column;
        int c = 0;
        for (; c + kLanes <= columns; c += kLanes)
            T::round(bias ? load<Floats>(sums + c) + T::widen(bias + c) : load<Floats>(sums + c), out + c);
        if (c == columns) return;
        Floats last = load<Floats>(sums + c);
        if (bias) last += read<T>(bias + c, columns - c);
        write<T>(last, out + c, columns - c);
    }

    Linear call_;
    Buffer<Word> panel_, x_;
    Buffer<float> sums_;
};

template <class T>
void run(const Linear& call) {
    const int64_t panels = (call.columns + kPanel - 1) / kPanel, tiles = (call.rows + kPanelRows - 1) / kPanelRows;
    share_out<Panel<T>>(panels * tiles, call.threads, call, [&](Panel<T>& panel, int64_t i) {
        panel.run(i % panels * kPanel, i / panels * kPanelRows);
    });
}

}  // namespace

extern "C" void linear(
    const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t columns,
    int64_t depth, int plain, int threads, int bf16) {
    const Linear call{x, weight, bias, out, rows, columns, depth, plain, threads};
    if (bf16) run<Bf16>(call);
    else run<Fp32>(call);
}
