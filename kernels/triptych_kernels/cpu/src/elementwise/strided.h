// Views as the operations of torch read and write them: any strides, any of four dtypes.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernel.h"
#include "simd/vec.h"

namespace triptych {

constexpr int kAxes = 4;  // of a row, the last one innermost

struct Strided {
  int64_t dtype;
  int64_t row_stride;  // in elements, as the others
  int64_t strides[kAxes];

  int64_t item_size() const { return dtype == kInt64 ? 8 : dtype == kBool ? 1 : dtype == kBfloat16 ? 2 : 4; }

  // The address of element `index` of the last axis; the index of that axis in `at` is not read.
  template <typename Void>
  Void* at(Void* base, int64_t row, const int64_t (&at)[kAxes], int64_t index) const {
    int64_t offset = row * row_stride + index * strides[kAxes - 1];
    for (int axis = 0; axis < kAxes - 1; ++axis) offset += at[axis] * strides[axis];
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(base) + offset * item_size();
  }
};

template <typename Real, typename T>
inline Real element(T x) {
  if constexpr (std::is_same_v<T, bf16>) return to_float(x);
  if constexpr (!std::is_same_v<T, bf16>) return static_cast<Real>(x);
}

template <typename T, typename Real>
inline T element_of(Real x) {
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(static_cast<float>(x));
  if constexpr (std::is_same_v<T, bool>) return x != 0;
  if constexpr (!std::is_same_v<T, bf16> && !std::is_same_v<T, bool>) return static_cast<T>(x);
}

template <typename T, typename Real>
void read_elements(const void* from, int64_t stride, int64_t count, Real* to) {
  const T* const source = static_cast<const T*>(from);
  if (stride == 0) {
    const Real value = element<Real>(*source);
    for (int64_t i = 0; i < count; ++i) to[i] = value;
    return;
  }
  int64_t i = 0;
  if constexpr (std::is_same_v<Real, float> && (std::is_same_v<T, float> || std::is_same_v<T, bf16>)) {
    if (stride == 1) {
      for (; i + kLanes <= count; i += kLanes) store(to + i, load(source + i));
    }
  }
  for (; i < count; ++i) to[i] = element<Real>(source[i * stride]);
}

template <typename T, typename Real>
void write_elements(void* to, int64_t stride, int64_t count, const Real* from) {
  T* const target = static_cast<T*>(to);
  int64_t i = 0;
  if constexpr (std::is_same_v<Real, float> && (std::is_same_v<T, float> || std::is_same_v<T, bf16>)) {
    if (stride == 1) {
      for (; i + kLanes <= count; i += kLanes) store(target + i, load(from + i));
    }
  }
  for (; i < count; ++i) target[i * stride] = element_of<T>(from[i]);
}

template <typename Real>
void read(int64_t dtype, const void* from, int64_t stride, int64_t count, Real* to) {
  if (dtype == kFloat32) return read_elements<float>(from, stride, count, to);
  if (dtype == kBfloat16) return read_elements<bf16>(from, stride, count, to);
  if (dtype == kInt64) return read_elements<int64_t>(from, stride, count, to);
  read_elements<bool>(from, stride, count, to);
}

template <typename Real>
void write(int64_t dtype, void* to, int64_t stride, int64_t count, const Real* from) {
  if (dtype == kFloat32) return write_elements<float>(to, stride, count, from);
  if (dtype == kBfloat16) return write_elements<bf16>(to, stride, count, from);
  if (dtype == kInt64) return write_elements<int64_t>(to, stride, count, from);
  write_elements<bool>(to, stride, count, from);
}

}  // namespace triptych
