// Linear layers, out = x weight^T + bias, or plain products, out = x weight. A row's bits depend on that row of x,
// not on how many there are.
//
// A task computes 64 columns of out, a panel, for a tile of rows, and arranges its part of the weight as it goes.

#include "vectors.h"

namespace {

constexpr int kPanel = 64;
constexpr int64_t kTile = 384;  // rows: transposing a panel is little beside its product; x stays in the second cache
constexpr int kDepth = 128;     // words of a panel at once: 32 KB, which stay in the first cache

struct Linear {
    const void *x, *weight, *bias;  // x [rows, depth], weight [columns, depth] or plain; bias may be null
    void* out;                      // [rows, columns]
    int64_t rows, columns, depth;
    int plain;  // weight is [depth, columns]
    int threads;
};

// Words first .. first + depth of up to 64 rows of the weight, as [words, 64]; places behind the last row repeat it.
inline void pack_rows(const Word* weight, int64_t words, int columns, int64_t first, int depth, Word* out) {
    for (int v = 0; v * kLanes < columns; ++v) {
        const Word* rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = weight + std::min(v * kLanes + i, columns - 1) * words + first;
        int word = 0;
        for (; word + kLanes <= depth; word += kLanes) {
            for (int i = 0; i < kLanes; ++i) __builtin_prefetch(rows[i] + word + kLanes * words);  // for the next 16
            transpose(rows, word, out + word * kPanel + v * kLanes, kPanel);
        }
        for (; word < depth; ++word)
            for (int i = 0; i < kLanes; ++i) out[word * kPanel + v * kLanes + i] = rows[i][word];
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
            store(out + word * kPanel + c, T::pair(low, high));
        }
}

template <class T>
class Panel {
    using Element = typename T::Element;

  public:
    void begin(const Linear& call) {
        call_ = call, words_ = call.depth / T::kPerWord;
        panel_.reserve(kDepth * kPanel), sums_.reserve(kTile * kPanel);
    }

    void run(int64_t column, int64_t begin) {
        const int rows = static_cast<int>(std::min(kTile, call_.rows - begin));
        const int columns = static_cast<int>(std::min<int64_t>(kPanel, call_.columns - column));
        const auto* x = static_cast<const Word*>(call_.x) + begin * words_;
        for (int64_t first = 0; first < words_; first += kDepth) {
            const int depth = static_cast<int>(std::min<int64_t>(kDepth, words_ - first));
            pack(column, columns, first, depth);
            product<T>(rows, (columns + kLanes - 1) / kLanes, {x + first, static_cast<int>(words_)},
                       {panel_.data(), kPanel}, {sums_.data(), kPanel}, depth, first > 0);
        }
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; c += kLanes)
                finish(r, begin + r, column + c, c, std::min(kLanes, columns - c));
    }

  private:
    void pack(int64_t column, int columns, int64_t first, int depth) {
        const auto* weight = static_cast<const Element*>(call_.weight);
        if (call_.plain)
            pack_plain<T>(weight + first * T::kPerWord * call_.columns + column, call_.columns, columns, depth,
                          panel_.data());
        else
            pack_rows(reinterpret_cast<const Word*>(weight) + column * words_, words_, columns, first, depth,
                      panel_.data());
    }

    void finish(int r, int64_t row, int64_t column, int c, int count) {
        Floats sum = load<Floats>(&sums_[r * kPanel + c]);
        if (call_.bias) sum += read<T>(static_cast<const Element*>(call_.bias) + column, count);
        write<T>(sum, static_cast<Element*>(call_.out) + row * call_.columns + column, count);
    }

    Linear call_;
    int64_t words_;
    Buffer<Word> panel_;
    Buffer<float> sums_;
};

template <class T>
void run(const Linear& call) {
    const int64_t panels = (call.columns + kPanel - 1) / kPanel, tiles = (call.rows + kTile - 1) / kTile;
#pragma omp parallel num_threads(call.threads)
    {
        static thread_local Panel<T> panel;
        panel.begin(call);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < panels * tiles; ++i) panel.run(i % panels * kPanel, i / panels * kTile);
    }
}

}  // namespace

extern "C" void linear(
    const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t columns,
    int64_t depth, int plain, int threads, int bf16) {
    const Linear call{x, weight, bias, out, rows, columns, depth, plain, threads};
    if (bf16) run<Bf16>(call);
    else run<Fp32>(call);
}
