// The tile instructions of AMX that products need: the processor's, or, where TRIPTYCH_AMX_EMULATED is defined,
// C++ that does what their manual says, for tests on other processors.
//
// They are written out here rather than taken from the compiler's header: its macros want literal numbers of tiles,
// and do not tell the compiler that a tile is loaded from memory.
#pragma once

#include <cstdint>

namespace triptych::amx {

constexpr int kNumTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// Operand of LDTILECFG: rows of each tile and bytes of each row; 0 for a tile that is not used.
struct Config {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64);

}  // namespace triptych::amx

#if defined(TRIPTYCH_AMX_EMULATED)

#include "simd/amx_emulated.h"

#else

namespace triptych::amx {

inline void configure(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

// Back to the state that a context switch neither saves nor restores.
inline void release() { asm volatile("tilerelease"); }

template <int Tile>
[[gnu::always_inline]] inline void set_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Rows lie `stride` bytes apart.
template <int Tile>
[[gnu::always_inline]] inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
[[gnu::always_inline]] inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Sums += Left * Right: [rows, 16] float32, [rows, 16 pairs] and [16 pairs, 16] bfloat16.
template <int Sums, int Left, int Right>
[[gnu::always_inline]] inline void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
}

// Sums += Left * Right: [rows, 16] int32, [rows, 64] bytes with signs or without, [16, 16 outputs of 4] signed bytes.
template <int Sums, int Left, int Right, bool Signed>
[[gnu::always_inline]] inline void multiply_bytes() {
  if constexpr (Signed) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
  } else {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
  }
}

}  // namespace triptych::amx

#endif
