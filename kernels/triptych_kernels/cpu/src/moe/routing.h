// The choice of experts for one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel.h"
#include "simd/element.h"

namespace triptych {

// What a logit becomes; moe.py has the names.
enum Score : int64_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2, kSparsemixer = 3, kGiven = 4 };

struct Routing {
  int64_t dtype;            // of the logits
  const void* logits;       // [rows, num_experts], rows `stride` elements apart
  int64_t stride;
  int64_t num_experts;
  int64_t top_k;
  int64_t score;
  int64_t renormalize;      // whether a token's weights are divided by their sum
  double scale;             // factor of the weights
  double jitter;            // of kSparsemixer
  int64_t num_groups;       // of as many experts each, one after the other
  int64_t top_groups;       // groups that a token chooses from
  int64_t group_experts;    // a group counts as the sum of so many of its largest scores
  const float* correction;  // [num_experts], added to the scores for the choice only; or null
  const float* expert_scales;  // [num_experts], factors of the weights; or null
  const int64_t* weight_index;  // [num_experts], index of each expert's weights among those of all ranks; null: its number
  int64_t layer;            // under which choices are counted; below 0 they are not

  int64_t group_size() const { return num_experts / num_groups; }
};

// The largest of some keys, in their order; of equal ones the first. NaN counts as the smallest.
class Largest {
 public:
  // keys, places: room for `count`
  Largest(float* keys, int32_t* places, int64_t count) : keys_(keys), places_(places), count_(count) {}

  void add(float key, int32_t place) {
    if (!(key > -std::numeric_limits<float>::infinity())) key = -std::numeric_limits<float>::infinity();
    if (used_ == count_ && !(key > keys_[count_ - 1])) return;
    int64_t at = used_ < count_ ? used_++ : count_ - 1;
    for (; at > 0 && key > keys_[at - 1]; --at) {
      keys_[at] = keys_[at - 1];
      places_[at] = places_[at - 1];
    }
    keys_[at] = key;
    places_[at] = place;
  }

 private:
  float* keys_;
  int32_t* places_;
  int64_t count_, used_ = 0;
};

// Chooses the experts of rows, one after the other, in memory that it is given.
class Router {
 public:
  static int64_t num_floats(const Routing& args) {
    return 2 * args.num_experts + 2 * args.top_k + 4 * args.num_groups;
  }

  // memory: [num_floats]
  Router(const Routing& args, float* memory)
      : args_(args),
        logits_(memory),
        keys_(logits_ + args.num_experts),
        chosen_keys_(keys_ + args.num_experts),
        group_keys_(chosen_keys_ + 2 * args.top_k),
        groups_(reinterpret_cast<int32_t*>(group_keys_ + 2 * args.num_groups)) {}

  // experts, weights: [top_k], in the order of the choice
  void choose(int64_t row, int32_t* experts, float* weights) {
    const int64_t count = args_.num_experts;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = row * args_.stride + i;
      logits_[i] = args_.dtype == kFloat32 ? static_cast<const float*>(args_.logits)[at]
                                           : to_float(static_cast<const bf16*>(args_.logits)[at]);
    }
    peak_ = total_ = 0.0f;
    if (args_.score == kSoftmax) measure();
    for (int64_t i = 0; i < count; ++i) {
      if (args_.score == kGiven) {
        keys_[i] = std::fabs(logits_[i]);
        continue;
      }
      keys_[i] = compares_scores() ? score(i) + (args_.correction ? args_.correction[i] : 0.0f) : logits_[i];
    }
    Largest largest(chosen_keys_, experts, args_.top_k);
    const auto add_group = [&](int64_t group) {
      const int64_t size = args_.group_size();
      for (int64_t i = group * size; i < (group + 1) * size; ++i) largest.add(keys_[i], static_cast<int32_t>(i));
    };
    if (args_.top_groups == args_.num_groups) {
      for (int64_t group = 0; group < args_.num_groups; ++group) add_group(group);
    } else {
      choose_groups();
      for (int64_t i = 0; i < args_.top_groups; ++i) add_group(groups_[i]);
    }
    weigh(experts, weights);
    if (args_.expert_scales == nullptr) return;
    for (int64_t i = 0; i < args_.top_k; ++i) weights[i] *= args_.expert_scales[experts[i]];
  }

 private:
  // Whether keys are scores; else logits have the same order.
  bool compares_scores() const {
    return args_.correction != nullptr || (args_.num_groups > 1 && args_.group_experts > 1);
  }

  // What the softmax divides by.
  void measure() {
    peak_ = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < args_.num_experts; ++i) peak_ = std::max(peak_, logits_[i]);
    if (args_.renormalize && !compares_scores()) return;
    for (int64_t i = 0; i < args_.num_experts; ++i) total_ += std::exp(logits_[i] - peak_);
  }

  float score(int64_t expert) const {
    const float logit = logits_[expert];
    if (args_.score == kSoftmax) return std::exp(logit - peak_) / total_;
    if (args_.score == kGiven) return logit;
    if (args_.score == kSigmoid) return 1.0f / (1.0f + std::exp(-logit));
    return std::sqrt(std::max(logit, 0.0f) + std::log1p(std::exp(-std::fabs(logit))));
  }

  // The groups to choose from, in their order, to groups_.
  void choose_groups() {
    const int64_t size = args_.group_size(), summed = std::min(args_.group_experts, size);
    Largest groups(group_keys_, groups_, args_.top_groups);
    float best[kMostSummed];
    int32_t places[kMostSummed];
    for (int64_t group = 0; group < args_.num_groups; ++group) {
      Largest largest(best, places, summed);
      for (int64_t i = group * size; i < (group + 1) * size; ++i) largest.add(keys_[i], static_cast<int32_t>(i));
      float sum = 0.0f;
      for (int64_t i = 0; i < summed; ++i) sum += best[i];
      groups.add(sum, static_cast<int32_t>(group));
    }
    std::sort(groups_, groups_ + args_.top_groups);  // of experts with equal keys the one with the lowest number is first
  }

  // The weight of each expert among those that are not chosen yet and near it; see expert_choice.py.
  void weigh_near(const int32_t* experts, float* weights) {
    const float near = 2.0f * static_cast<float>(args_.jitter);
    for (int64_t i = 0; i < args_.top_k; ++i) {
      const float best = logits_[experts[i]];
      float sum = 0.0f;
      for (int64_t expert = 0; expert < args_.num_experts; ++expert) {
        const float logit = logits_[expert];
        if ((best - logit) / std::max(std::fabs(logit), best) > near) continue;
        if (std::find(experts, experts + i, expert) == experts + i) sum += std::exp(logit - best);
      }
      weights[i] = static_cast<float>(args_.scale) / sum;
    }
  }

  void weigh(const int32_t* experts, float* weights) {
    if (args_.score == kSparsemixer) return weigh_near(experts, weights);
    float sum = 0.0f, peak = -std::numeric_limits<float>::infinity();
    if (args_.score == kSoftmax && args_.renormalize) {
      for (int64_t i = 0; i < args_.top_k; ++i) peak = std::max(peak, logits_[experts[i]]);
    }
    for (int64_t i = 0; i < args_.top_k; ++i) {
      const bool is_relative = args_.score == kSoftmax && args_.renormalize;
      weights[i] = is_relative ? std::exp(logits_[experts[i]] - peak) : score(experts[i]);
      sum += weights[i];
    }
    if (args_.score != kSoftmax) sum += kSmallestSum;
    const auto scale = static_cast<float>(args_.scale);
    for (int64_t i = 0; i < args_.top_k; ++i) weights[i] = (args_.renormalize ? weights[i] / sum : weights[i]) * scale;
  }

  static constexpr int64_t kMostSummed = 2;
  static constexpr float kSmallestSum = 1e-20f;  // scores of 0 come to 0

  const Routing& args_;
  float *logits_, *keys_, *chosen_keys_, *group_keys_;
  int32_t* groups_;
  float peak_ = 0.0f, total_ = 0.0f;
};

}  // namespace triptych
