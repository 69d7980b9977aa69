// The instructions of amx.h in C++, with the faults of the real ones: a misuse ends the process.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED,
// TDPBF16PS, TDPBSSD, TDPBUSD.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "simd/vec.h"

namespace triptych::amx {

// The configuration of one thread (palette 0: none) and its tiles.
struct State {
  Config config{.palette = 0};
  uint8_t tiles[kNumTiles][kTileRows][kTileRowBytes] = {};
};
inline thread_local State state;

inline void check(bool holds, const char* instruction) {
  if (holds) return;
  std::fprintf(stderr, "emulated AMX: #UD or #GP at %s\n", instruction);
  std::abort();
}

inline bool is_configured(int tile) { return state.config.palette == 1 && state.config.rows[tile] > 0; }

inline void configure(const Config& config) {
  check(state.config.palette == 0, "ldtilecfg, on tiles that were not released");  // which real ones allow
  check(config.palette == 1 && config.start_row == 0, "ldtilecfg");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = config.rows[tile], row_bytes = config.row_bytes[tile];
    check(rows <= kTileRows && row_bytes <= kTileRowBytes && (rows == 0) == (row_bytes == 0), "ldtilecfg");
    check(rows == 0 || tile < kNumTiles, "ldtilecfg");
  }
  state = {.config = config};
}

inline void release() { state = {}; }

template <int Tile>
void set_zero() {
  check(is_configured(Tile), "tilezero");
  std::memset(state.tiles[Tile], 0, sizeof state.tiles[Tile]);
}

template <int Tile>
void load(const void* from, int64_t stride) {
  set_zero<Tile>();
  for (int row = 0; row < state.config.rows[Tile]; ++row) {
    std::memcpy(state.tiles[Tile][row], static_cast<const char*>(from) + row * stride, state.config.row_bytes[Tile]);
  }
}

template <int Tile>
void store(void* to, int64_t stride) {
  check(is_configured(Tile), "tilestored");
  for (int row = 0; row < state.config.rows[Tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, state.tiles[Tile][row], state.config.row_bytes[Tile]);
  }
}

// Even and odd products are summed apart, then together, then added. Not inlined, nor looked into: the compiler must
// not take arithmetic out of the mode that the caller sets.
using Rows = uint8_t (*)[kTileRowBytes];
[[gnu::noinline, gnu::noipa]] inline void multiply(Rows sums, Rows left, Rows right, int rows, int pairs, int columns) {
  const auto element = [](const uint8_t* row, int index) {
    bf16 value;
    std::memcpy(&value, row + index * sizeof value, sizeof value);
    return to_float(value);
  };
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      float even = 0.0f, odd = 0.0f;
      for (int k = 0; k < pairs; ++k) {
        even = std::fma(element(left[row], 2 * k), element(right[k], 2 * column), even);
        odd = std::fma(element(left[row], 2 * k + 1), element(right[k], 2 * column + 1), odd);
      }
      float sum;
      std::memcpy(&sum, sums[row] + column * sizeof sum, sizeof sum);
      sum = sum + (even + odd);
      std::memcpy(sums[row] + column * sizeof sum, &sum, sizeof sum);
    }
  }
}

inline void check_product(int sums, int left, int right, const char* instruction) {
  const Config& config = state.config;
  check(sums != left && sums != right && left != right, instruction);
  check(is_configured(sums) && is_configured(left) && is_configured(right), instruction);
  check(config.rows[sums] == config.rows[left] && config.row_bytes[sums] == config.row_bytes[right], instruction);
  check(config.row_bytes[left] == 4 * config.rows[right] && config.row_bytes[right] % 4 == 0, instruction);
}

template <int Sums, int Left, int Right, bool Signed>
void multiply_bytes() {
  check_product(Sums, Left, Right, "tdpbssd or tdpbusd");
  const Config& config = state.config;
  for (int row = 0; row < config.rows[Sums]; ++row) {
    for (int column = 0; column < config.row_bytes[Sums] / 4; ++column) {
      int32_t sum;
      std::memcpy(&sum, state.tiles[Sums][row] + 4 * column, sizeof sum);
      for (int k = 0; k < config.row_bytes[Left]; ++k) {
        const uint8_t left = state.tiles[Left][row][k];
        const int factor = Signed ? static_cast<int8_t>(left) : left;
        sum += factor * static_cast<int8_t>(state.tiles[Right][k / 4][4 * column + k % 4]);
      }
      std::memcpy(state.tiles[Sums][row] + 4 * column, &sum, sizeof sum);
    }
  }
}

template <int Sums, int Left, int Right>
void multiply() {
  check_product(Sums, Left, Right, "tdpbf16ps");
  const Config& config = state.config;
  constexpr unsigned kQuietToNearest = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(kQuietToNearest | kFlushToZero | kDenormalsAreZero);
  multiply(state.tiles[Sums], state.tiles[Left], state.tiles[Right], config.rows[Sums], config.rows[Right],
           config.row_bytes[Sums] / 4);
  _mm_setcsr(mode);
}

}  // namespace triptych::amx
