// y = x·wᵀ + b for a few rows x, bound by reading w once: every row of w is used for up to four rows
// of x while it is in registers. Float32 sums, whatever the weights' type.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

typedef float vec __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));

static const int64_t AHEAD = 32768;  // bytes; rows follow each other, so this is some later row

static inline vec load(const float* p) {
  vec v;
  __builtin_memcpy(&v, p, 32);
  return v;
}

static inline float sum(vec v) {
  vec4 a, b;
  __builtin_memcpy(&a, &v, 16);
  __builtin_memcpy(&b, (const char*)&v + 16, 16);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

// Sixteen weights as two vectors. Two bfloat16 share a word, so a shift and a mask give the even
// and the odd ones; `arrange` puts x into the same order.
static inline void pair(const float* p, vec& a, vec& b) {
  a = load(p);
  b = load(p + 8);
}

static inline void pair(const at::BFloat16* p, vec& a, vec& b) {
  words w;
  __builtin_memcpy(&w, p, 32);
  words even = w << 16, odd = w & 0xffff0000u;
  __builtin_memcpy(&a, &even, 32);
  __builtin_memcpy(&b, &odd, 32);
}

static const float* arrange(const float* x, int64_t rows, int64_t K, std::vector<float>&) { return x; }

static const float* arrange(
    const at::BFloat16* x, int64_t rows, int64_t K, std::vector<float>& buffer) {
  buffer.resize(rows * K);
  for (int64_t m = 0; m < rows; m++) {
    const at::BFloat16* from = x + m * K;
    float* to = buffer.data() + m * K;
    int64_t k = 0;
    for (; k + 16 <= K; k += 16)
      for (int i = 0; i < 8; i++) {
        to[k + i] = from[k + 2 * i];
        to[k + 8 + i] = from[k + 2 * i + 1];
      }
    for (; k < K; k++) to[k] = from[k];
  }
  return buffer.data();
}

// Outputs n … n+R-1 of M rows.
template <typename T, int M, int R>
static void outputs(const float* x, const T* w, const T* bias, T* y, int64_t K, int64_t N, int64_t n) {
  vec acc[R][M] = {};
  const int64_t whole = K / 16 * 16;
  for (int64_t k = 0; k < whole; k += 16)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const T* p = w + (n + r) * K + k;
      __builtin_prefetch((const char*)p + AHEAD);
      vec a, b;
      pair(p, a, b);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        acc[r][m] += a * load(x + m * K + k);
        acc[r][m] += b * load(x + m * K + k + 8);
      }
    }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) {
      float s = sum(acc[r][m]);
      for (int64_t k = whole; k < K; k++) s += float(w[(n + r) * K + k]) * x[m * K + k];
      y[m * N + n + r] = T(s + (bias ? float(bias[n + r]) : 0.f));
    }
}

template <typename T, int M>
static void product(const float* x, const T* w, const T* bias, T* y, int64_t K, int64_t N) {
  constexpr int R = M <= 2 ? 4 : 2;  // R·M sums stay in registers
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, K));
  at::parallel_for(0, N / R, grain, [&](int64_t from, int64_t to) {
    for (int64_t n = from * R; n < to * R; n += R) outputs<T, M, R>(x, w, bias, y, K, N, n);
  });
  for (int64_t n = N / R * R; n < N; n++) outputs<T, M, 1>(x, w, bias, y, K, N, n);
}

template <typename T>
static void run(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, at::Tensor& y) {
  const int64_t rows = x.size(0), K = w.size(1), N = w.size(0);
  std::vector<float> buffer;
  const float* px = arrange(x.const_data_ptr<T>(), rows, K, buffer);
  const T* pw = w.const_data_ptr<T>();
  const T* pb = bias ? bias->const_data_ptr<T>() : nullptr;
  T* py = y.mutable_data_ptr<T>();
  for (int64_t m = 0; m < rows; m += 4, px += 4 * K, py += 4 * N) switch (rows - m) {
      case 1: product<T, 1>(px, pw, pb, py, K, N); break;
      case 2: product<T, 2>(px, pw, pb, py, K, N); break;
      case 3: product<T, 3>(px, pw, pb, py, K, N); break;
      default: product<T, 4>(px, pw, pb, py, K, N);
    }
}

at::Tensor few_rows(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), "few_rows: x and weight differ in dtype");
  TORCH_CHECK(x.size(-1) == w.size(1), "few_rows: x and weight differ in width");
  TORCH_CHECK(w.is_contiguous(), "few_rows: weight must be contiguous");
  at::Tensor flat = x.reshape({-1, w.size(1)}).contiguous();
  at::Tensor y = at::empty({flat.size(0), w.size(0)}, w.options());
  if (w.scalar_type() == at::kFloat) run<float>(flat, w, bias, y);
  else if (w.scalar_type() == at::kBFloat16) run<at::BFloat16>(flat, w, bias, y);
  else TORCH_CHECK(false, "few_rows: float32 or bfloat16, not ", w.scalar_type());
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  return y.view(shape);
}

TORCH_LIBRARY(spiralformer, m) { m.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }
TORCH_LIBRARY_IMPL(spiralformer, CPU, m) { m.impl("few_rows", few_rows); }
