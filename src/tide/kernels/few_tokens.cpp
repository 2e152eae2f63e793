// A linear map of few tokens: y[t] = weight x[t] + bias, each row of the weight read once.
//
// A tile is some rows of the weight times some tokens, with all of its sums in registers. The rows
// stay in a cache until every token has met them, so memory is read as for one token.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTokens = 6;  // 24 sums, 4 rows and a state: 29 of 32 registers
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kTokens = 6;
#else
constexpr int kLanes = 8, kTokens = 2;
#endif
constexpr int kRows = 4;
// Of fewer tokens, torch's own product reads each weight once too; of more, arithmetic is what
// takes time, and torch's is tuned.
constexpr int64_t kFewest = 4, kMost = 20;
constexpr int64_t kWorthAThread = 1 << 16;  // products

typedef float Vector __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// Loads bits of bfloat16: a float is the same bits, with zeros after them.
inline Vector load(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef uint32_t Wholes __attribute__((vector_size(4 * kLanes)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Wholes wholes = __builtin_convertvector(halves, Wholes) << 16;
  Vector found;
  std::memcpy(&found, &wholes, sizeof found);
  return found;
}

inline float value(float of) { return of; }
inline float value(uint16_t of) {
  const uint32_t whole = static_cast<uint32_t>(of) << 16;
  float found;
  std::memcpy(&found, &whole, sizeof found);
  return found;
}

inline float sum(Vector of) {
  float lanes[kLanes];
  std::memcpy(lanes, &of, sizeof lanes);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

struct Sizes {
  int64_t in, out;
};

template <int rows, int tokens, typename Weight>
inline void tile(const float* x, const Weight* weight, const float* bias, float* y, Sizes n) {
  Vector sums[rows][tokens] = {};
  int64_t k = 0;
  for (; k + kLanes <= n.in; k += kLanes) {
    Vector weights[rows];
    for (int r = 0; r < rows; ++r) weights[r] = load(weight + r * n.in + k);
    for (int t = 0; t < tokens; ++t) {
      const Vector state = load(x + t * n.in + k);
      for (int r = 0; r < rows; ++r) sums[r][t] += weights[r] * state;
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < rows; ++r) {
      float total = sum(sums[r][t]);
      for (int64_t i = k; i < n.in; ++i) total += value(weight[r * n.in + i]) * x[t * n.in + i];
      y[t * n.out + r] = bias ? total + bias[r] : total;
    }
}

// All tokens, by tiles that are as wide as possible.
template <int rows, int tokens, typename Weight>
inline void strip(const float* x, const Weight* weight, const float* bias, float* y, int64_t left,
                  Sizes n) {
  for (; left >= tokens; left -= tokens, x += tokens * n.in, y += tokens * n.out)
    tile<rows, tokens>(x, weight, bias, y, n);
  if constexpr (tokens > 1) strip<rows, tokens - 1>(x, weight, bias, y, left, n);
}

bool takes(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto fits = [](const at::Tensor& of) {
    return of.scalar_type() == at::kFloat && of.is_cpu() && of.is_contiguous();
  };
  if (!fits(x) || !fits(weight) || x.dim() < 2 || weight.dim() != 2) return false;
  const bool added = !bias || (fits(*bias) && bias->dim() == 1 && bias->size(0) == weight.size(0));
  return added && weight.size(1) == x.size(-1);  // else torch's own tells what is wrong
}

// y = weight x + bias of a few tokens, on all threads; bits of bfloat16 are a weight too.
template <typename Weight>
void multiply(const float* x, const Weight* weight, const float* bias, float* y, int64_t tokens,
              Sizes n) {
  const int64_t grain = 1 + kWorthAThread / (kRows * n.in * tokens);
  at::parallel_for(0, (n.out + kRows - 1) / kRows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kRows; row < std::min(end * kRows, n.out); row += kRows) {
      const float* here = bias ? bias + row : nullptr;
      if (row + kRows <= n.out) {
        strip<kRows, kTokens>(x, weight + row * n.in, here, y + row, tokens, n);
      } else {
        for (int64_t r = row; r < n.out; ++r)
          strip<1, kTokens>(x, weight + r * n.in, bias ? bias + r : bias, y + r, tokens, n);
      }
    }
  });
}

const float* data(const std::optional<at::Tensor>& of) {
  return of ? of->const_data_ptr<float>() : nullptr;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const Sizes n{x.size(-1), weight.size(0)};
  const int64_t tokens = x.numel() / std::max<int64_t>(n.in, 1);
  if (tokens < kFewest || tokens > kMost || !takes(x, weight, bias))
    return at::linear(x, weight, bias);
  auto shape = x.sizes().vec();
  shape.back() = n.out;
  at::Tensor y = at::empty(shape, x.options());
  multiply(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), data(bias),
           y.mutable_data_ptr<float>(), tokens, n);
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tide, library) {
  library.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(tide, CPU, library) { library.impl("linear", &linear); }
