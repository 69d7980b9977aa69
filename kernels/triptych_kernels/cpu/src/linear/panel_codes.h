// Writing codes of a file into panels (coded.h), for the kernels that fill weights.
#pragma once

#include "linear/coded.h"

namespace triptych::coded {

// Codes of a group, one in each byte, at the words of its panel.
inline void put_codes(int64_t bits, const uint8_t* codes, char* words, int64_t lane) {
  const auto put_word = [&](int word, uint32_t value) {
    std::memcpy(words + (word * kPanel + lane) * sizeof value, &value, sizeof value);
  };
  // those of a step, one in each byte
  const auto step_of = [&](int step) {
    uint32_t value;
    std::memcpy(&value, codes + 4 * step, sizeof value);
    return value;
  };
  if (bits == 8) {
    for (int step = 0; step < bytes::kSteps; ++step) put_word(step, step_of(step));
    return;
  }
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int word = 0; word < 4; ++word) put_word(word, (step_of(word) & kLow) | (step_of(4 + word) & kLow) << 4);
  if (bits == 4) return;
  for (int plane = 0; plane < 2; ++plane) {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= (step_of(4 * plane + i) >> 4 & 0x03030303) << 2 * i;
    put_word(4 + plane, value);
  }
}

// f(for_each): of `run` neighbouring panels, which one thread takes; for_each(g) calls g(first, end) with the rows of
// each. Rows of one panel write into the same lines. Each thread has a part of its own: where two write into the same
// huge page for the first time, both clear one, and one of them is thrown away.
template <typename F>
void for_panels(int64_t first, int64_t rows, int64_t half, int64_t run, const F& f) {
  const int64_t lanes = half < 0 ? kPanel : kLanes, end = first + rows, first_panel = first / lanes;
  const int64_t panels = (end - 1) / lanes - first_panel + 1;
  parallel_for_parts((panels + run - 1) / run, [&](int64_t index) {
    f([&](const auto& g) {
      for (int64_t panel = index * run; panel < std::min((index + 1) * run, panels); ++panel) {
        const int64_t row = (first_panel + panel) * lanes;
        g(std::max(row, first), std::min(row + lanes, end));
      }
    });
  });
}

}  // namespace triptych::coded
