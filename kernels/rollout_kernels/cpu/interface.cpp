// What bindings.py checks when it loads the kernels: that both sides mean the same structures and constants.

#include <cstddef>

#include "attention.h"

extern "C" {

// in the order of bindings.Interface
struct Interface {
    int64_t version, attention_size, attention_scale, span_size, segment_size, lanes, bf16_pairs;
};

void kernel_interface(Interface* out) {
    *out = {2, sizeof(Attention), offsetof(Attention, scale), sizeof(Span), kSegment, kLanes, kBf16Pairs};
}

}
