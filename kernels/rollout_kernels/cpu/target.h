// What the target has, and what follows from it: the one place that asks for an instruction set.
//
// kLanes floats fill a vector register; wider vectors would live in memory. A product keeps kTileRows x kTileVectors
// sums in registers, beside the vectors of one row of its right side and one element of its left, and goes through
// kTileDepth rows of the right side at a time, which stay in the first cache. One or two rows take kFewRowsVectors, so
// that there are as many independent sums as the multiply-adds in flight.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET_REGISTER "v"  // what inline assembly calls a vector register
#elif defined(__aarch64__)
#include <arm_neon.h>
#define TARGET_REGISTER "w"
#else
#define TARGET_REGISTER "m"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TARGET_AVX512
constexpr int kLanes = 16, kTileRows = 6, kTileVectors = 4, kFewRowsVectors = 4;  // of 32 registers
#elif defined(__AVX2__) && defined(__FMA__)
#define TARGET_AVX2
constexpr int kLanes = 8, kTileRows = 6, kTileVectors = 2, kFewRowsVectors = 4;  // of 16 registers
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 4, kTileVectors = 4, kFewRowsVectors = 4;  // of 32 registers
#else
constexpr int kLanes = 4, kTileRows = 4, kTileVectors = 2, kFewRowsVectors = 4;  // of 16, as SSE has
#endif
constexpr int kTileDepth = 128;  // longer sums would round more often

// Rows that share a packed panel of a weight: packing is little beside their products, and they stay in the second
// cache, which targets with AVX-512 have more of.
#ifdef TARGET_AVX512
constexpr int64_t kPanelRows = 384;
#else
constexpr int64_t kPanelRows = 192;
#endif

// Whether bf16 products are computed by instructions that take pairs of bf16; otherwise bf16 is widened to fp32 first.
#if defined(TARGET_AVX512) && defined(__AVX512BF16__)
#define TARGET_BF16_PAIRS
constexpr bool kBf16Pairs = true;
#else
constexpr bool kBf16Pairs = false;
#endif
