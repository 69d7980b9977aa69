// What follows the sums of a panel's rows: bias, adapter, activation and rounding.
#pragma once

#include "linear/panel.h"

namespace triptych {

// How rows are finished: each by `finish_row`, or by its arithmetic for a case that is looked at once.
enum Ending { kRowByRow, kPlain, kWithGelu, kActivated, kGated };

// Rows of one panel, one after the other, on their way from sums to results of type O.
template <typename O, Ending E>
class PanelRows {
 public:
  PanelRows(const Linear& args, int64_t row, int64_t panel)
      : args_(&args), row_(row), panel_(panel), bias_(args.bias ? args.bias + panel * kPanel : kNoBias),
        out_(static_cast<O*>(args.out) + row * args.out_stride + panel * (E == kGated ? kLanes : kPanel)) {}

  // Finishes the next row.
  [[gnu::always_inline]] void finish(vec first, vec second) {
    if constexpr (E == kRowByRow) {
      finish_row<O>(*args_, row_++, panel_, first, second);
    } else {
      store_row(first + triptych::load(bias_), second + triptych::load(bias_ + kLanes));
      out_ += args_->out_stride;
    }
  }

 private:
  static constexpr bool kRounded = sizeof(O) == sizeof(bf16);
  alignas(64) static constexpr float kNoBias[kPanel] = {};

  void store_row(vec first, vec second) const {
    if constexpr (E == kGated) {
      triptych::store(out_, activate_gated<kRounded>(args_->activation, first, second));
    } else {
      triptych::store(out_, activated(first));
      triptych::store(out_ + kLanes, activated(second));
    }
  }

  vec activated(vec x) const {
    if constexpr (E == kPlain) return x;
    else if constexpr (E == kWithGelu) return gelu<kRounded>(x);  // of most encoders: a call would take as long as itself
    else return activate<kRounded>(args_->activation, x);
  }

  const Linear* args_;
  int64_t row_, panel_;
  const float* bias_;
  O* out_;
};

// f.operator()<O, E>() for the case that the panels before `end_panel` are.
template <typename F>
void with_ending(const Linear& args, int64_t end_panel, const F& f) {
  const auto of_type = [&]<typename O>(O) {
    if (args.adapted || end_panel * kPanel > args.out_features) {
      f.template operator()<O, kRowByRow>();
    } else if (args.gated) {
      f.template operator()<O, kGated>();
    } else if (args.activation == kNoActivation) {
      f.template operator()<O, kPlain>();
    } else if (args.activation == kGelu) {
      f.template operator()<O, kWithGelu>();
    } else {
      f.template operator()<O, kActivated>();
    }
  };
  args.out_dtype == kFloat32 ? of_type(float()) : of_type(bf16());
}

// Finish the rows of a tile, `count` from `row` on. Not inlined: products are made for many heights of tiles.
[[gnu::noinline]] inline void finish_rows(const Linear& args, int64_t row, int64_t count, int64_t panel,
                                          const vec (*sums)[2]) {
  with_ending(args, panel + 1, [&]<typename O, Ending E>() {
    PanelRows<O, E> rows(args, row, panel);
    for (int64_t i = 0; i < count; ++i) rows.finish(sums[i][0], sums[i][1]);
  });
}

}  // namespace triptych
