// Products of float32 inputs with packed weights of 16 bits, which are widened to float32: what float32 weights give,
// bit by bit, at half the bytes.
#include "linear/float_tile.h"

namespace triptych {
namespace {

// The 16 bits, as the arguments name them.
enum Form : int64_t { kBfloat16Weights = 0, kFloat16Weights = 1 };

struct WidenedLinear {
  Linear linear;  // x is float32
  int64_t form;
};

struct PackWidened {
  int64_t form;
  const uint16_t* rows;  // [rows, in_features]
  uint16_t* panels;
  int64_t in_features;
  int64_t first_row;     // where the first row goes, in its piece
  int64_t half;          // as for place_of
};

struct WidenedEmbedding {
  int64_t form;
  const uint16_t* panels;
  const int64_t* token_ids;  // [rows]
  float* out;                // [rows, in_features]
  int64_t in_features;
};

// f(line) of the form that the arguments name.
template <typename F>
void with_line(int64_t form, const F& f) {
  form == kBfloat16Weights ? f(Bfloat16Line()) : f(Float16Line());
}

template <typename Line>
void pack(const PackWidened& args, int64_t rows) {
  constexpr int64_t kTogether = 32;  // inputs: a cache line of a row
  const int64_t size = args.in_features, lanes = args.half < 0 ? kPanel : kLanes;
  const int64_t first = args.first_row, end = first + rows;
  // rows of one panel write into the same lines, so one thread takes them all
  parallel_for((end - 1) / lanes - first / lanes + 1, [&](int64_t index) {
    const int64_t panel_row = (first / lanes + index) * lanes;
    const int64_t begin_row = std::max(panel_row, first), end_row = std::min(panel_row + lanes, end);
    for (int64_t start = 0; start < size; start += kTogether) {
      for (int64_t row = begin_row; row < end_row; ++row) {
        const uint16_t* from = args.rows + (row - first) * size;
        const Place place = place_of(row, args.half);
        uint16_t* to = args.panels + place.panel * size * kPanel + Line::place(place.lane);
        for (int64_t k = start; k < std::min(start + kTogether, size); ++k) to[k * kPanel] = from[k];
      }
    }
  });
}

template <typename Line>
void embed(const WidenedEmbedding& args, int64_t rows) {
  const int64_t size = args.in_features;
  parallel_for(rows, [&](int64_t row) {
    const Place place = place_of(args.token_ids[row], -1);
    const uint16_t* from = args.panels + place.panel * size * kPanel + Line::place(place.lane);
    float* to = args.out + row * size;
    for (int64_t start = 0; start < size; start += kPanel, to += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, size - start);
      uint16_t line[kPanel] = {};  // of this many inputs of one output, as if they were outputs of one input
      for (int64_t i = 0; i < count; ++i, from += kPanel) {
        prefetch_once(from + 16 * kPanel);
        line[Line::place(i)] = *from;
      }
      vec values[2];
      Line::widen(line, values);
      store_vec(to, values[0], count);
      if (count > kLanes) store_vec(to + kLanes, values[1], count - kLanes);
    }
  });
}

}  // namespace

ProductSteps widened_product(const WeightForm& form) {
  ProductSteps product;
  with_line(form.form, [&](auto line) {
    using Line = decltype(line);
    product = float_product<Line>([](const Linear& linear, const WeightForm&, int64_t rows) {
      multiply_floats<Line>(linear, rows);
    });
  });
  return product;
}

}  // namespace triptych

TRIPTYCH_KERNEL(widened_linear, triptych::WidenedLinear,
                linear.dtype, linear.out_dtype, linear.x, linear.x_stride, linear.weight, linear.bias, linear.out,
                linear.out_stride, linear.in_features, linear.out_features, linear.activation, linear.gated,
                linear.stages, linear.slots, linear.adapters, linear.num_adapters, linear.adapted,
                linear.adapter_dtype, form) {
  using namespace triptych;
  with_adapters(args.linear, rows, [&](const Linear& linear) {
    with_line(args.form, [&](auto line) { multiply_floats<decltype(line)>(linear, rows); });
  });
}

TRIPTYCH_KERNEL(pack_widened, triptych::PackWidened,
                form, rows, panels, in_features, first_row, half) {
  triptych::with_line(args.form, [&](auto line) { triptych::pack<decltype(line)>(args, rows); });
}

TRIPTYCH_KERNEL(widened_embedding, triptych::WidenedEmbedding,
                form, panels, token_ids, out, in_features) {
  triptych::with_line(args.form, [&](auto line) { triptych::embed<decltype(line)>(args, rows); });
}
