// The gate of a checkpoint, all of it: which tokens exit, as what, and how sure.
//
// What `tide.exits.gate.ExitGate` decides, in one call: most tokens are rejected by a few
// candidates, and for the others the exit head is read. Follows `few_tokens.cpp`, whose `multiply`
// it calls.

#include <ATen/ops/from_blob.h>

#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor numbers(std::vector<int64_t>& of) {
  return at::from_blob(of.data(), {static_cast<int64_t>(of.size())}, at::kLong);
}

// y = weight x + bias without torch's own product, which takes long to begin, and would convert bits
// of bfloat16 as a whole first: x is float.
// Of many tokens torch's own is faster; in a model of bfloat16 with x rounded to that, as its layers do.
template <typename Weight>
Tensor product(const Tensor& x, const Weight* weight, const float* bias, int64_t out,
               at::ScalarType model) {
  constexpr auto dtype = std::is_same_v<Weight, float> ? at::kFloat : at::kBFloat16;
  const int64_t tokens = x.size(0), in = x.size(1);
  if (tokens > kMost && (dtype == at::kFloat || dtype == model)) {
    const Tensor whole = at::from_blob(const_cast<Weight*>(weight), {out, in}, dtype);
    Tensor y = at::linear(x.to(dtype), whole).to(at::kFloat);
    if (bias) y += at::from_blob(const_cast<float*>(bias), {out}, at::kFloat);
    return y;
  }
  Tensor y = at::empty({tokens, out}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  for (int64_t t = 0; t < tokens; t += kMost)
    multiply(from + t * in, weight, bias, to + t * out, std::min(kMost, tokens - t), {in, out});
  return y;
}

bool numeric(const Tensor& of) {
  return of.is_contiguous() &&
         (of.scalar_type() == at::kFloat || of.scalar_type() == at::kBFloat16);
}

// What a function gives for the numbers of a tensor: floats, or bits of bfloat16.
template <typename Function>
auto with_numbers(const Tensor& of, Function function) {
  if (of.scalar_type() == at::kBFloat16)
    return function(static_cast<const uint16_t*>(of.const_data_ptr()));
  return function(of.const_data_ptr<float>());
}

Maybe as_float(const Maybe& of) { return of ? Maybe(of->to(at::kFloat)) : std::nullopt; }

// States after the residual affine map of an exit head, if it has one.
Tensor transformed(const Tensor& states, const Maybe& affine, const float* bias,
                   at::ScalarType model) {
  if (!affine) return states.clone();
  Tensor read = with_numbers(*affine, [&](const auto* weight) {
    return product(states, weight, bias, states.size(1), model);
  });
  const float* from = states.const_data_ptr<float>();
  float* sums = read.mutable_data_ptr<float>();
  for (int64_t k = 0; k < states.numel(); ++k) sums[k] += from[k];
  return read;
}

template <typename Weight>
float dot(const float* a, const Weight* b, int64_t n) {
  Vector sums = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) sums += load(a + k) * load(b + k);
  float total = sum(sums);
  for (; k < n; ++k) total += a[k] * value(b[k]);
  return total;
}

// States after a norm, in place.
void norm(Tensor& states, const float* weight, const float* bias, double eps, bool centred) {
  const int64_t size = states.size(1);
  float* to = states.mutable_data_ptr<float>();
  for (int64_t t = 0; t < states.size(0); ++t, to += size) {
    float mean = 0;
    if (centred) {
      for (int64_t k = 0; k < size; ++k) mean += to[k];
      mean /= size;
      for (int64_t k = 0; k < size; ++k) to[k] -= mean;
    }
    const float scale = 1 / std::sqrt(dot(to, to, size) / size + static_cast<float>(eps));
    for (int64_t k = 0; k < size; ++k) {
      to[k] *= scale;
      if (weight) to[k] *= weight[k];
      if (bias) to[k] += bias[k];
    }
  }
}

struct Scale {
  float multiplier, cap;
  float operator()(float logit) const {
    logit *= multiplier;
    return cap ? std::tanh(logit / cap) * cap : logit;
  }
};

float silu(float x) { return x / (1 + std::exp(-x)); }
float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

constexpr size_t kParts = 18;

// What only this gate reads, weights and thresholds, one after the other; a part of size 0 is not
// there.
struct Parts {
  const float* weights;
  at::IntArrayRef sizes;
  size_t at = 0;
  struct Part {
    const float* of;
    int64_t size;
  };
  Part next() {
    const int64_t size = sizes[at++];
    const float* of = size ? weights : nullptr;
    weights += size;
    return {of, size};
  }
};

// Two linear maps with SiLU between them: a router, or a confidence model.
struct Model {
  const float *inner, *inner_bias, *outer, *outer_bias;
  int64_t width, features;
  explicit Model(Parts& parts) {
    const auto [first, size] = parts.next();
    inner = first;
    const auto [bias, many] = parts.next();
    inner_bias = bias, width = many;
    features = width ? size / width : 0;
    outer = parts.next().of, outer_bias = parts.next().of;
  }
  explicit operator bool() const { return inner != nullptr; }
  // What follows the inner map.
  float finish(const float* from) const {
    float total = *outer_bias;
    for (int64_t w = 0; w < width; ++w) total += outer[w] * silu(from[w]);
    return total;
  }
  float operator()(const float* of) const {
    std::vector<float> values(width);
    for (int64_t w = 0; w < width; ++w)
      values[w] = inner_bias[w] + dot(inner + w * features, of, features);
    return sigmoid(finish(values.data()));
  }
};

// The two largest of some numbers, and the logarithm of the sum of their exponentials.
struct Tops {
  float first = -INFINITY, second = -INFINITY, total = -INFINITY;
  int64_t index = 0;
  Tops(const float* of, int64_t n) {
    for (int64_t k = 0; k < n; ++k) {
      if (of[k] > first) {
        second = first, first = of[k], index = k;
      } else if (of[k] > second) {
        second = of[k];
      }
    }
    double sum = 0;  // in single precision, a long tail would be lost behind a likely token
    for (int64_t k = 0; k < n; ++k) sum += std::exp(of[k] - first);
    total = first + static_cast<float>(std::log(sum));
  }
};

// Log-probabilities among the candidates of the first, the second, and what context and table
// predict; the logit of the first; the length of the context's match and the table's chance.
void candidate_features(const float* logits, int64_t count, const int64_t* note, float* to) {
  const Tops found(logits, count);
  const float chances[] = {found.first, found.second, logits[count - 2], logits[count - 1]};
  for (int i = 0; i < 4; ++i) to[i] = std::max(chances[i] - found.total, -20.0f);
  to[4] = found.first;
  to[5] = note[2];
  to[6] = note[4];
}

// Of the predicted token: its odds, its lead, the router, and whether context and table agree.
void confidence_features(const Tops& found, float routed, int64_t token, const int64_t* note,
                         float* to) {
  const float surest = std::min(found.first - found.total, -1e-6f);
  to[0] = std::clamp(surest - std::log(-std::expm1(surest)), -10.0f, 10.0f);
  to[1] = std::min(surest - (found.second - found.total), 10.0f);
  to[2] = routed;
  const auto vote = [&](int64_t other) { return other < 0 ? 0 : other == token ? 1 : -1; };
  for (int length = 3; length; --length) to[6 - length] = note[2] == length ? vote(note[1]) : 0;
  const float table = vote(note[3]) * (note[4] / 255.0f);
  to[6] = std::max(table, 0.0f);
  to[7] = std::max(-table, 0.0f);
}

Tensor decide_exits(const Tensor& given, const Tensor& notes, const Maybe& affine,
                    const Tensor& weights, at::IntArrayRef sizes, const Maybe& given_norm_weight,
                    const Maybe& given_norm_bias, double norm_eps, bool centred, const Tensor& head,
                    const Maybe& given_head_bias, double multiplier, double cap, const Maybe& places,
                    const Maybe& vocabulary, double router_eps) {
  const int64_t n = given.size(0), size = given.size(1);
  TORCH_CHECK(numeric(given) && numeric(head) &&
                  (!affine || (numeric(*affine) && affine->numel() == size * size)),
              "tide::decide_exits takes contiguous states, heads and affine maps, float32 or "
              "bfloat16");
  TORCH_CHECK(sizes.size() == kParts && sizes.back() == 3 && weights.is_contiguous() &&
                  weights.numel() == std::accumulate(sizes.begin(), sizes.end(), int64_t{0}),
              "tide::decide_exits takes ", kParts, " parts in one contiguous tensor");
  const Scale scale{static_cast<float>(multiplier), static_cast<float>(cap)};
  const Tensor noted = notes.contiguous();
  const int64_t* note = noted.const_data_ptr<int64_t>();
  const int64_t noted_size = notes.size(1);
  Tensor decision = at::empty({n, 3}, at::kFloat);
  float* to = decision.mutable_data_ptr<float>();
  std::fill(to, to + 3 * n, 0.0f);
  if (!n) return decision;

  // In the order of `FusedGate`.
  Parts parts{weights.const_data_ptr<float>(), sizes};
  const float* affine_bias = parts.next().of;
  const auto [fixed, fixed_size] = parts.next();
  const float* fixed_bias = parts.next().of;
  const float* router_norm = parts.next().of;
  const Model router(parts), prefilter(parts), confidence(parts);
  const float* router_threshold = parts.next().of;
  const float* thresholds = parts.next().of;
  const float prefilter_threshold = thresholds[0], confidence_threshold = thresholds[1];
  const float top_probability = thresholds[2];

  // Sums are float32 whatever the weights are.
  const Tensor states = given.to(at::kFloat);
  const Maybe norm_weight = as_float(given_norm_weight), norm_bias = as_float(given_norm_bias);
  const Maybe head_bias = as_float(given_head_bias);
  const at::ScalarType model = given.scalar_type();
  Tensor read = transformed(states, affine, affine_bias, model);
  norm(read, data(norm_weight), data(norm_bias), norm_eps, centred);
  const float* normed = read.const_data_ptr<float>();

  std::vector<int64_t> passed;
  Tensor among;
  const int64_t count = fixed_size / size;
  if (prefilter) among = product(read, fixed, fixed_bias, count, model);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t* told = note + t * noted_size;
    float& score = to[3 * t + 2] = NAN;
    bool exits = told[0] != 0;
    if (prefilter) {
      std::vector<float> logits(count + 2);
      const float* fixed_logits = among.const_data_ptr<float>() + t * count;
      for (int64_t k = 0; k < count; ++k) logits[k] = scale(fixed_logits[k]);
      for (int i = 0; i < 2; ++i) {
        const int64_t token = told[1 + 2 * i];
        const bool known = token >= 0 && token < places->size(0);
        const int64_t place = known ? places->const_data_ptr<int64_t>()[token] : -1;
        if (place < 0) {
          logits[count + i] = -INFINITY;
          continue;
        }
        const float read_of = with_numbers(head, [&](const auto* weight) {
          return dot(normed + t * size, weight + place * size, size);
        });
        const float bias = head_bias ? data(head_bias)[place] : 0;
        logits[count + i] = scale(read_of + bias);
      }
      float features[7];
      candidate_features(logits.data(), count + 2, told, features);
      score = prefilter(features);
      exits = exits && score >= prefilter_threshold;
    }
    if (exits) passed.push_back(t);
  }

  std::vector<float> routed(passed.size(), 0);
  if (router && !passed.empty()) {
    Tensor some = states.index_select(0, numbers(passed));
    norm(some, router_norm, nullptr, router_eps, false);
    const Tensor inner = product(some, router.inner, router.inner_bias, router.width, model);
    const float* from = inner.const_data_ptr<float>();
    std::vector<int64_t> kept;
    std::vector<float> of_kept;
    for (size_t k = 0; k < passed.size(); ++k, from += router.width) {
      const float total = router.finish(from);
      if (router_threshold) {
        float& score = to[3 * passed[k] + 2] = sigmoid(total);
        if (!(score >= *router_threshold)) continue;  // NaN exits nowhere
      }
      kept.push_back(passed[k]);
      of_kept.push_back(total);
    }
    passed = kept;
    routed = of_kept;
  }
  if (passed.empty()) return decision;

  // By the exit head.
  Tensor some = read;
  if (static_cast<int64_t>(passed.size()) < n)
    some = read.index_select(0, numbers(passed));
  const int64_t read_tokens = head.size(0);
  Tensor logits = with_numbers(head, [&](const auto* weight) {
    return product(some, weight, data(head_bias), read_tokens, model);
  });
  float* row = logits.mutable_data_ptr<float>();
  for (size_t k = 0; k < passed.size(); ++k, row += read_tokens) {
    if (multiplier != 1 || cap)
      for (int64_t v = 0; v < read_tokens; ++v) row[v] = scale(row[v]);
    const Tops found(row, read_tokens);
    const int64_t t = passed[k], *told = note + t * noted_size;
    const int64_t token =
        vocabulary ? vocabulary->const_data_ptr<int64_t>()[found.index] : found.index;
    bool exits = true;
    if (confidence) {
      float features[8];
      confidence_features(found, routed[k], token, told, features);
      to[3 * t + 2] = confidence(features);
      exits = to[3 * t + 2] >= confidence_threshold;
    }
    exits = exits && std::exp(found.first - found.total) >= top_probability;
    to[3 * t] = exits;
    to[3 * t + 1] = token;
  }
  return decision;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tide, library) {
  library.def(
      "decide_exits(Tensor states, Tensor notes, Tensor? affine, Tensor weights, int[] sizes, "
      "Tensor? norm_weight, Tensor? norm_bias, float norm_eps, bool centred, Tensor head, "
      "Tensor? head_bias, float multiplier, float cap, Tensor? places, Tensor? vocabulary, "
      "float router_eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(tide, CPU, library) { library.impl("decide_exits", &decide_exits); }
