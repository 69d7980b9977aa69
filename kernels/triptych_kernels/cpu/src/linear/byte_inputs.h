// Inputs rounded to 8-bit integers, with a scale and a zero point per row and group: input = scale * (integer - zero),
// whatever the weights are. The zero point matters: groups lean to one side, and without it the error is nearly twice as
// large. The rows of a tile lie interleaved, so that one address reaches them all:
//
//   [tiles][groups] of
//     starts   [rows] int32        kCenterBits - kOffset of 4 bits * (sum of the group's integers)
//     scales   [rows] float        value of a unit
//     centers  [rows] float        -kCenter * scale, exactly
//     zeros    [rows] float        -zero * scale
//     sums     [rows] float        of the group's inputs
//     values   [rows][32] bytes    the integers, in order
//
// Inputs beyond 2^111 count as infinite.
#pragma once

#include <bit>
#include <cstring>
#include <limits>

#include "linear/quantized.h"

namespace triptych::bytes {

constexpr int kSteps = kGroup / 4;
constexpr float kLevels = 254.0f;        // between the smallest and the largest input; both round up at times, to 255
constexpr float kCenter = 12582912.0f;   // 1.5 * 2^23, with units of 1
constexpr int32_t kCenterBits = 0x4b400000;
constexpr int32_t kNibbleOffset = 8;     // what nibbles are stored with more than their weights are

// Where the parts of a group begin, in units of 4 bytes and of the tile's rows.
enum Part { kStarts, kScales, kCenters, kZeros, kSums, kValues };
constexpr int64_t kRowUnits = kValues + kSteps;

constexpr uint32_t kAllLanes = (1u << kLanes) - 1;

// Lane i of the result is the lanes of a[i], combined by f.
template <typename F>
vec fold(vec (&a)[kLanes], const F& f) {
  transpose(a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a[i] = f(a[i], a[i + half]);
  }
  return a[0];
}

// The range of inputs that are not all finite: infinite, or NaN if there is one.
template <typename X>
float flawed_range(const X* x) {
  float range = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float value = std::fabs(to_float(x[i]));
    if (!(value <= range)) range = value;
    if (std::isnan(range)) break;
  }
  return range;
}

// As many groups as a vector has lanes, since reductions and divisions then cost as much as of one: x[i] becomes row
// rows[i] of the group at to[i], where there are `height` rows.
template <typename X>
void quantize_groups(const X* const (&x)[kLanes], const int64_t (&rows)[kLanes], int32_t* const (&to)[kLanes],
                     int64_t height) {
  constexpr int kVectors = kGroup / kLanes;
  vec smallest[kLanes], largest_values[kLanes];
  uint32_t flawed = 0;
  for (int i = 0; i < kLanes; ++i) {
    smallest[i] = largest_values[i] = zero();
    uint32_t finite = ~0u;
    unroll<kVectors>([&](auto j) {
      const vec values = load(x[i] + j * kLanes);
      finite &= greater(splat(std::numeric_limits<float>::infinity()), abs(values));
      smallest[i] = min(smallest[i], values);
      largest_values[i] = max(largest_values[i], values);
    });
    if (finite != kAllLanes) flawed |= 1u << i;
  }
  const vec low = fold(smallest, [](vec a, vec b) { return min(a, b); });
  vec range = fold(largest_values, [](vec a, vec b) { return max(a, b); }) - low;
  if (flawed != 0) {
    float ranges[kLanes];
    store(ranges, range);
    for (int i = 0; i < kLanes; ++i) {
      if (flawed >> i & 1) ranges[i] = flawed_range(x[i]);
    }
    range = load(ranges);
  }
  const uint32_t counts = at_least(range, splat(kSmallestMagnitude)) | unordered(range, range);
  const vec inverse = only(counts, splat(kLevels) / range);
  const ivec shift = to_ints((zero() - low) * inverse) + splat_int(kLowestByte);
  float inverses[kLanes], scales[kLanes];
  int32_t shifts[kLanes];
  store(inverses, inverse);
  store(scales, range / splat(kLevels));
  store(reinterpret_cast<float*>(shifts), as_vec(shift));

  vec integers[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    auto* const bytes = reinterpret_cast<int8_t*>(to[i] + kValues * height + rows[i] * kSteps);
    ivec sum = splat_int(0);
    unroll<kVectors>([&](auto j) {
      const ivec rounded = to_ints(load(x[i] + j * kLanes) * splat(inverses[i])) + splat_int(shifts[i]);
      sum = sum + rounded;
      store_input_bytes(bytes + j * kLanes, rounded);
    });
    integers[i] = to_floats(sum);
  }
  float totals[kLanes];
  store(totals, sums(integers));
  for (int i = 0; i < kLanes; ++i) {
    const auto total = static_cast<int32_t>(totals[i]);
    // without its last two bits, so that its product with kCenter = 3 * 2^22 is exact
    const float scale = std::bit_cast<float>(std::bit_cast<int32_t>(scales[i]) & ~3);
    int32_t* const at = to[i] + rows[i];
    const auto put = [&](int64_t part, auto value) { std::memcpy(at + part * height, &value, sizeof value); };
    put(kStarts, kCenterBits + kUnsignedStart - kNibbleOffset * total);
    put(kScales, scale);
    put(kCenters, -kCenter * scale);
    put(kZeros, -scale * static_cast<float>(shifts[i]));
    put(kSums, scale * static_cast<float>(total - kGroup * shifts[i]));
  }
}

}  // namespace triptych::bytes
