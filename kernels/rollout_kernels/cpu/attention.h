// What the forward and the backward of segment attention share: the call, and one segment of keys or values.

#pragma once

#include <vector>

#include "product.h"

constexpr int kSegment = 64, kVectors = kSegment / kLanes;
constexpr int kTaskRows = 64;  // query rows times heads per kv head that one task takes

extern "C" {

// Query rows row_begin .. row_end of `rows` and `lengths`, against num_segments from first_segment on, whose units are
// listed from unit_begin on. goes_on: later spans hold further segments of these rows.
struct Span {
    int64_t row_begin, row_end, unit_begin, first_segment, num_segments, goes_on;
};

// T rows, D head size, a multiple of 16. q, out and their gradients: [T, heads, D]. keys and values: [units, unit, D].
struct Attention {
    const void *q, *keys, *values;
    void* out;
    float* lse;     // [T, heads], log-sum-exp in units of ln 2
    float* states;  // [T, heads, D + kLanes + 1], of rows that go on
    const void* grad_out;
    const float* delta;                    // [T, heads], sum of grad_out * out
    float *grad_q, *grad_keys, *grad_values;  // fp32, shaped as what they are of
    const int64_t *rows, *lengths, *units;
    const Span* spans;  // those that begin at segment 0 first
    int64_t num_spans, num_first, heads, kv_heads, dim, unit, head_stride, window, num_threads, bf16;
    float scale;  // of scores
};
}

// Rows of one task: a kv head, and query rows that attend the same KV. The r-th row is a query row and a head.
struct TaskRows {
    const Attention& call;
    int64_t begin, end, head;
    int groups = static_cast<int>(call.heads / call.kv_heads);

    int size() const { return static_cast<int>(end - begin) * groups; }
    int64_t length(int r) const { return call.lengths[begin + r / groups]; }
    int64_t longest() const { return call.lengths[end - 1]; }
    int64_t place(int r) const {  // in [T * heads]
        return call.rows[begin + r / groups] * call.heads + head * groups + r % groups;
    }
    int64_t first_segment(const Span& span) const {  // the first that some row's window reaches
        const int64_t seen = call.window ? (call.lengths[begin] - call.window) / kSegment : 0;
        return std::max(span.first_segment, seen);
    }
    int64_t end_segment(const Span& span) const {  // behind the last that some row reaches
        return std::min(span.first_segment + span.num_segments, (longest() + kSegment - 1) / kSegment);
    }
    static int64_t query_rows(const Attention& call) {  // how many a task takes at most
        return std::max<int64_t>(1, kTaskRows / (call.heads / call.kv_heads));
    }
    static size_t most(const Attention& call) { return query_rows(call) * (call.heads / call.kv_heads); }
};

// Where a segment's positions lie, and which are visible to a row.
struct Segment {
    int64_t first;  // position
    int visible;    // how many positions the longest row sees
    int64_t at[kSegment];  // element offset of each; places behind the last visible one repeat it, and are masked

    int vectors() const { return (visible + kLanes - 1) / kLanes; }

    Segment(const TaskRows& rows, const Span& span, int64_t segment) : first(segment * kSegment) {
        const Attention& call = rows.call;
        visible = static_cast<int>(std::min<int64_t>(kSegment, rows.longest() - first));
        const int64_t* unit = call.units + span.unit_begin + (first - span.first_segment * kSegment) / call.unit;
        for (int p = 0; p < visible; ++unit) {
            int64_t offset = (*unit + rows.head * call.head_stride) * call.unit * call.dim;
            for (int i = 0; i < call.unit; ++i, ++p, offset += call.dim) at[p] = offset;
        }
        for (int p = visible; p < kSegment; ++p) at[p] = at[visible - 1];
    }

    // Ask for the keys and values, which lie in many places, before they are needed.
    template <class Element>
    void prefetch(const Attention& call) const {
        const auto *keys = static_cast<const Element*>(call.keys), *values = static_cast<const Element*>(call.values);
        for (int p = 0; p < visible; ++p)
            for (int64_t d = 0; d < call.dim; d += 64 / sizeof(Element)) {
                __builtin_prefetch(keys + at[p] + d, 0, 2);
                __builtin_prefetch(values + at[p] + d, 0, 2);
            }
    }

    // scores of kLanes positions, with -inf where a row of this length does not see the position
    Floats masked(Floats score, int vector, int64_t length, int64_t window) const {
        const int64_t end = length - first, begin = window ? end - window : 0;
        if (end >= (vector + 1) * kLanes && begin <= vector * kLanes) return score;
        const Ints position = lane_numbers() + vector * kLanes;
        const int until = static_cast<int>(std::clamp<int64_t>(end, 0, kSegment));
        const int from = static_cast<int>(std::clamp<int64_t>(begin, 0, kSegment));
        const Ints visible_lanes = (position < until) & (position >= from);
        return visible_lanes ? score : all(-kInfinity);
    }

    // keys or values as [words of D, positions]
    template <class T>
    void by_word(const typename T::Element* storage, int words, Word* out) const {
        for (int v = 0; v < vectors(); ++v) {
            const typename T::Element* rows[kLanes];
            for (int i = 0; i < kLanes; ++i) rows[i] = storage + at[v * kLanes + i];
            transpose_rows<T>(rows, words, out + v * kLanes, kSegment);
        }
    }

    // keys or values as [words of positions, D]
    template <class T>
    void by_position(const typename T::Element* storage, int dim, Word* out) const {
        for (int p = 0; p < vectors() * kLanes; p += T::kPerWord, out += dim)
            for (int d = 0; d < dim; d += kLanes)
                store(out + d, T::pair(storage + at[p] + d, storage + at[p + T::kPerWord - 1] + d));
    }
};
