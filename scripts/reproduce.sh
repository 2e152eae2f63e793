#!/usr/bin/env bash
# Run the commands behind the result files of the docs again, and print how long each took.
#
#   TIDE_DATA=... scripts/reproduce.sh               # all, most of a day on two cores
#   TIDE_DATA=... scripts/reproduce.sh trees_speed   # only what is named
#
#   scripts/reproduce.sh risk_simulation             # two minutes; its seed is fixed
#
# Each step writes bench/results/NAME.json anew: `git diff bench/results` compares it with what was
# published. Then `python scripts/tables.py && python scripts/charts.py`. Work files are kept in $WORK, so that
# a run that was interrupted does not calibrate again. Nothing else should run on the machine. Needs
# `PIP_CONSTRAINT=.ci/constraints.txt pip install -e '.[dev]'`, the torch of the results, vLLM
# (docs/vllm.md) and, for `vllm_drafts`, arctic-inference.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=("$@")
steps=$(grep -oP '^step \K\w+' scripts/reproduce.sh | xargs)
for name in "${wanted[@]}"; do
  if [[ " $steps " != *" $name "* ]]; then
    echo "There is no step $name. The steps are: $steps" >&2
    exit 2
  fi
done
WORK=${WORK:-reproduced}
R=bench/results
SPEC=${TIDE_DATA:-}/spec_bench/question.jsonl
mkdir -p "$WORK"
case " ${wanted[*]} " in
  " risk_simulation " | " kernels ") MODEL="" ;; # these need no weights
  *) MODEL=$(python scripts/weights.py | tail -1) ;;
esac

# step NAME COMMAND...: run it if it is wanted; it writes bench/results/NAME.json.
step() {
  local name=$1 began=$SECONDS
  shift
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  "$@"
  printf '%s: %d s\n' "$name" $((SECONDS - began))
}
# last_line FILE COMMAND...: keep the JSON that a command prints at the end.
last_line() { local out=$1; shift; "$@" --json | tail -1 > "$WORK/last_line" && mv "$WORK/last_line" "$out"; }
weights() { python scripts/weights.py "$1" | tail -1; }

# What calibration makes; the other steps that take DIR need it.
DIR=$WORK/smollm2
prompts() {
  [ -f "$WORK/prompts.jsonl" ] || python scripts/calibration_prompts.py "$WORK/prompts.jsonl"
}
# on_prompts NAME COMMAND OPTIONS...: with calibration prompts, on a model by name.
on_prompts() {
  local name=$1 command=$2
  shift 2
  prompts
  tide "$command" "$(weights "$name")" --data "$WORK/prompts.jsonl" --dtype bfloat16 --threads 2 "$@"
}
step calibration_smollm2 last_line $R/calibration_smollm2.json on_prompts smollm2 calibrate \
  -o "$DIR" --work "$WORK/smollm2.work"
step assess_smollm2 last_line $R/assess_smollm2.json on_prompts smollm2 assess
assess() { last_line "$R/assess_$1.json" on_prompts "$1" assess; }
small_calibration() {
  last_line "$R/calibration_$1.json" on_prompts "$1" calibrate -o "$WORK/$1" --samples 64 \
    --new-tokens 32
}
step assess_gemma3_270m assess gemma3_270m
step calibration_gemma3_270m small_calibration gemma3_270m
step assess_qwen2_5_coder_0_5b assess qwen2_5_coder_0_5b
step calibration_qwen2_5_coder_0_5b small_calibration qwen2_5_coder_0_5b

# Certificates, and what they cost and gain.
step certificates_spec_bench python bench/certificates.py "$MODEL" "$DIR" --threads 1 \
  --certify spec_bench --serve gsm8k --sequences 390 --threshold-scale 0.125 1 --force \
  --save "$WORK/certified" --out $R/certificates_spec_bench.json
step certificates_gsm8k python bench/certificates.py "$MODEL" "$DIR" --threads 1 --certify gsm8k \
  --serve spec_bench --same 200 --sequences 300 --threshold-scale 0.125 0.25 0.5 1 2 --new 48 \
  --force --out $R/certificates_gsm8k.json
modes() {
  [ -d "$WORK/draft" ] || tide export-draft "$MODEL" "$DIR" -o "$WORK/draft"
  tide bench "$MODEL" "$WORK/certified" --dtype bfloat16 --threads 2 --data "$SPEC" --samples 26 \
    --new-tokens 64 --threshold-scale 0.125 0.5 1 2 6 --risk 0.02 0.05 --draft "$WORK/draft" \
    --out $R/bench_smollm2.json
}
step bench_smollm2 modes
step attack tide bench "$MODEL" "$WORK/certified" --attack --risk 0.05 --dtype bfloat16 --threads 1 \
  --data "$SPEC" --samples 32 --new-tokens 32 --out $R/attack.json
step lm_eval python bench/lm_eval_tasks.py "$MODEL" "$WORK/certified" --threads 1 --out $R/lm_eval.json
step noise_floor python bench/noise_floor.py "$MODEL" --threads 1 --prompts 26 --new 48 \
  --out $R/noise_floor.json
code_prompts() {
  [ -f "$WORK/code.jsonl" ] || python scripts/calibration_prompts.py "$WORK/code.jsonl" --code
}

# Models of four sizes: calibrated on at least 60,000 tokens of their own, then timed.
# depth MODEL DATA PROMPTS NEW_TOKENS; in bfloat16, with SUFFIX=_bf16 (on a CPU with amx_bf16).
depth() {
  local name=$1$SUFFIX data=$2 samples=$3 new=$4
  prompts
  code_prompts
  tide calibrate "$(weights "$1")" -o "$WORK/depth_$name" --data "$WORK/$data.jsonl" \
    --samples "$samples" --new-tokens "$new" --interval 2 --dtype "$(dtype)" --threads 2 \
    --engine vllm --work "$WORK/depth_$name.work" --json | tail -1 > "$WORK/last_line"
  mv "$WORK/last_line" "$R/depth_$name.json"
}
SUFFIX=""
dtype() { [ -n "$SUFFIX" ] && echo bfloat16 || echo float32; }
# modes_of MODEL DATA BATCH PROMPTS OPTIONS...
modes_of() {
  code_prompts
  local name=$1$SUFFIX
  tide bench "$(weights "$1")" "$WORK/depth_$name" --data "$2" --batch "$3" --samples "$4" \
    --dtype "$(dtype)" --threads 2 --new-tokens 48 --out "$R/modes_${name}_batch_$3.json" "${@:5}"
}
step depth_smollm2 depth smollm2 prompts 700 128
step depth_gemma3_270m depth gemma3_270m prompts 560 128
step depth_qwen2_5_coder_0_5b depth qwen2_5_coder_0_5b code 360 256
step depth_qwen2_5_coder_1_5b depth qwen2_5_coder_1_5b code 400 256
gate_costs() {
  python bench/gate_costs.py "$(weights "$1")" --repeats 200 --dtype "$(dtype)" \
    --out "$R/gate_costs_$1$SUFFIX.json"
}
step gate_costs_smollm2 gate_costs smollm2
step gate_costs_qwen2_5_coder_1_5b gate_costs qwen2_5_coder_1_5b
few_tokens() {
  python bench/few_tokens.py "$(weights "$1")" --out "$R/few_tokens_$1.json"
}
step few_tokens_smollm2 few_tokens smollm2
step few_tokens_qwen2_5_coder_0_5b few_tokens qwen2_5_coder_0_5b
step few_tokens_qwen2_5_coder_1_5b few_tokens qwen2_5_coder_1_5b
step certificates_smollm2 python bench/certificates.py "$MODEL" "$WORK/depth_smollm2" \
  --dtype float32 --certify gsm8k --serve spec_bench --sequences 400 --same 200 --fresh 64 --new 48 \
  --threshold-scale 0.125 0.5 1 2 --save "$WORK/depth_smollm2" --out $R/certificates_smollm2.json
coder_certificates() {
  local at=$WORK/depth_qwen2_5_coder_0_5b
  python bench/certificates.py "$(weights qwen2_5_coder_0_5b)" "$at" --dtype float32 \
    --certify gsm8k_code --serve spec_bench --sequences 320 --same 128 --fresh 48 --new 48 \
    --threshold-scale 0.25 0.5 1 2 --save "$at.certified" --out $R/certificates_qwen2_5_coder_0_5b.json
}
step certificates_qwen2_5_coder_0_5b coder_certificates
# On other prompts, since the first test has shown no risk below 5 %.
strict_certificates() {
  local at=$WORK/depth_qwen2_5_coder_0_5b.certified
  python bench/certificates.py "$(weights qwen2_5_coder_0_5b)" "$at" --dtype float32 \
    --certify gsm8k_code --serve spec_bench --risk 0.01 0.02 --skip 448 --sequences 320 --same 96 \
    --fresh 32 --new 48 --threshold-scale 0.06 0.125 --save "$at" --unused "$WORK/problems.jsonl" \
    --out $R/certificates_qwen2_5_coder_0_5b_strict.json
}
step certificates_qwen2_5_coder_0_5b_strict strict_certificates
certified_modes() {
  tide bench "$(weights qwen2_5_coder_0_5b)" "$WORK/depth_qwen2_5_coder_0_5b.certified" \
    --data "$WORK/problems.jsonl" --batch 1 --samples 8 --dtype float32 --threads 2 --new-tokens 48 \
    --risk 0.02 0.05 --compile --out $R/modes_qwen2_5_coder_0_5b_certified.json
}
step modes_qwen2_5_coder_0_5b_certified certified_modes
step modes_smollm2_batch_1 modes_of smollm2 "$SPEC" 1 13 --compile-only
step modes_smollm2_batch_4 modes_of smollm2 "$SPEC" 4 24
step modes_gemma3_270m_batch_1 modes_of gemma3_270m "$SPEC" 1 13 --compile
step modes_gemma3_270m_batch_4 modes_of gemma3_270m "$SPEC" 4 24
step modes_qwen2_5_coder_0_5b_batch_1 modes_of qwen2_5_coder_0_5b "$WORK/code.jsonl" 1 13 --compile
step modes_qwen2_5_coder_0_5b_batch_4 modes_of qwen2_5_coder_0_5b "$WORK/code.jsonl" 4 24
step modes_qwen2_5_coder_1_5b_batch_1 modes_of qwen2_5_coder_1_5b "$WORK/code.jsonl" 1 6 --compile
step modes_qwen2_5_coder_1_5b_batch_4 modes_of qwen2_5_coder_1_5b "$WORK/code.jsonl" 4 24
step replay python bench/replay.py "$MODEL" "$WORK/depth_smollm2" --batch 1 4 --documents 8 \
  --dtype float32 --out $R/replay.json
step prefill python bench/prefill.py "$MODEL" "$WORK/depth_smollm2" --prompts 6 \
  --out $R/prefill.json
self_drafts() {
  code_prompts
  python bench/self_drafts.py "$(weights qwen2_5_coder_1_5b)" --data "$WORK/code.jsonl" --prompts 10 \
    --new 48 --gaps 2 4 8 --out $R/self_drafts.json
}
step self_drafts self_drafts

# The same in bfloat16, for CPUs with amx_bf16.
SUFFIX=_bf16
step gate_costs_smollm2_bf16 gate_costs smollm2
step gate_costs_qwen2_5_coder_1_5b_bf16 gate_costs qwen2_5_coder_1_5b
step depth_smollm2_bf16 depth smollm2 prompts 700 128
step depth_gemma3_270m_bf16 depth gemma3_270m prompts 570 128
step depth_qwen2_5_coder_0_5b_bf16 depth qwen2_5_coder_0_5b code 360 256
step depth_qwen2_5_coder_1_5b_bf16 depth qwen2_5_coder_1_5b code 400 256
# certify_on_problems MODEL OPTIONS...: on problems of GSM8K to be solved by a program; those that are not
# used are for `tide bench`.
certify_on_problems() {
  local at=$WORK/depth_$1_bf16
  python bench/certificates.py "$(weights "$1")" "$at" --dtype bfloat16 --certify gsm8k_code \
    --serve spec_bench --sequences 256 --same 64 --fresh 16 --new 48 --batch 16 --save "$at" \
    --unused "$at.work/unused.jsonl" "${@:2}"
}
step certificates_qwen2_5_coder_0_5b_bf16 certify_on_problems qwen2_5_coder_0_5b --risk 0.02 0.05 \
  --threshold-scale 0.06 0.125 0.5 1 --out $R/certificates_qwen2_5_coder_0_5b_bf16.json
step certificates_qwen2_5_coder_1_5b_bf16 certify_on_problems qwen2_5_coder_1_5b --risk 0.02 0.05 \
  --threshold-scale 0.125 0.5 --out $R/certificates_qwen2_5_coder_1_5b_bf16.json
# On other prompts, since the first test has shown no risk below 5 %.
step certificates_qwen2_5_coder_1_5b_bf16_strict certify_on_problems qwen2_5_coder_1_5b --risk 0.02 \
  --skip 320 --threshold-scale 0.03 0.06 --out $R/certificates_qwen2_5_coder_1_5b_bf16_strict.json
compiled_modes() { modes_of "${@:1:4}" --compile-only "${@:5}"; }
step modes_smollm2_bf16_batch_1 compiled_modes smollm2 "$SPEC" 1 13
step modes_smollm2_bf16_batch_4 compiled_modes smollm2 "$SPEC" 4 24
step modes_gemma3_270m_bf16_batch_1 compiled_modes gemma3_270m "$SPEC" 1 13
step modes_gemma3_270m_bf16_batch_4 compiled_modes gemma3_270m "$SPEC" 4 24
step modes_qwen2_5_coder_0_5b_bf16_batch_1 compiled_modes qwen2_5_coder_0_5b "$WORK/code.jsonl" 1 13
step modes_qwen2_5_coder_0_5b_bf16_batch_4 compiled_modes qwen2_5_coder_0_5b "$WORK/code.jsonl" 4 24
step modes_qwen2_5_coder_1_5b_bf16_batch_1 compiled_modes qwen2_5_coder_1_5b "$WORK/code.jsonl" 1 10
step modes_qwen2_5_coder_1_5b_bf16_batch_4 compiled_modes qwen2_5_coder_1_5b "$WORK/code.jsonl" 4 16
# on_problems MODEL: certified, on problems that were not used for certificates.
on_problems() {
  compiled_modes "$1" "$WORK/depth_$1_bf16.work/unused.jsonl" 1 10 --risk 0.02 0.05 \
    --out "$R/modes_$1_bf16_certified.json"
}
step modes_qwen2_5_coder_0_5b_bf16_certified on_problems qwen2_5_coder_0_5b
step modes_qwen2_5_coder_1_5b_bf16_certified on_problems qwen2_5_coder_1_5b
SUFFIX=""
step risk_simulation python bench/risk_simulation.py --out $R/risk_simulation.json

# Speed in transformers.
hero() { python scripts/hero.py "$(weights qwen2_5_coder_0_5b)" "$WORK/depth_qwen2_5_coder_0_5b"; }
step hero hero
# A small artifact for the runs that need one.
small() {
  [ -d "$WORK/small" ] || tide calibrate "$MODEL" -o "$WORK/small" --data scripts/small_prompts.jsonl \
    --dtype float32 --threads 1 --interval 8 --samples 60 --new-tokens 56
}
# trees MODEL NAME OPTIONS...: by the names of the model and of the result.
trees() {
  python bench/trees.py "$(weights "$1")" --sizes 32 --threads 1 --work "$WORK/$2.jsonl" \
    --out "$R/$2.json" "${@:3}"
}
with_table() {
  small
  trees smollm2 trees --artifact "$WORK/small" \
    --only "prompt lookup" chain "tree, 32 nodes" "tree, 32 nodes + table"
}
step trees with_table
step trees_one_branch trees smollm2 trees_one_branch --prompts 38 --only chain "one branch, 10 nodes"
step trees_qwen2_5_coder_0_5b trees qwen2_5_coder_0_5b trees_qwen2_5_coder_0_5b \
  --only "prompt lookup" chain "tree, 32 nodes"
step trees_speed python bench/compiled.py "$MODEL" --dtype bfloat16 --batch 1 --exits 0 \
  --out $R/trees_speed.json
step compiled python bench/compiled.py "$MODEL" --out $R/compiled.json
# without_amx COMMAND...: run it on CPUs without matrix instructions for bf16.
without_amx() {
  if grep -q amx_bf16 /proc/cpuinfo; then echo "left out, for CPUs without amx_bf16"; return; fi
  "$@"
}
step compiled_no_amx without_amx python bench/compiled.py "$MODEL" --dtype float32 --batch 1 \
  --prompts 12 --exits 0 --out $R/compiled_no_amx.json
step compiled_cold env TORCHINDUCTOR_CACHE_DIR="$(mktemp -d)" python bench/compiled.py "$MODEL" \
  --dtype float32 --batch 1 --prompts 6 --exits 0 --out $R/compiled_cold.json
qwen() { "$@" "$(weights qwen2_5_coder_0_5b)"; }
step compiled_qwen2_5_coder_0_5b qwen python bench/compiled.py --dtype bfloat16 --batch 1 \
  --prompts 6 --exits 0 --out $R/compiled_qwen2_5_coder_0_5b.json
step lossless python bench/lossless.py "$MODEL" --artifact "$DIR" --out $R/lossless.json
assisted() {
  code_prompts
  python bench/lossless.py "$(weights qwen2_5_coder_1_5b)" --assistant "$(weights qwen2_5_coder_0_5b)" \
    --data "$WORK/code.jsonl" --prompts 8 --new 32 --dtype float32 --out $R/assisted.json
}
step assisted assisted
step decode_limit_smollm2 python bench/decode_limit.py "$MODEL" --repeats 7 \
  --out $R/decode_limit_smollm2.json
step decode_limit_random python bench/decode_limit.py random-llama-2048x16 --new 12 --repeats 2 \
  --out $R/decode_limit_random.json
step decode_limit_random_bf16 python bench/decode_limit.py random-llama-2048x16 --dtype bfloat16 \
  --batch 1 --new 16 --repeats 6 --out $R/decode_limit_random_bf16.json
step runner_overhead python bench/runner_overhead.py "$MODEL" --out $R/runner_overhead.json
step quickstart python scripts/quickstart_times.py "$MODEL"
step_costs() {
  small
  python bench/step_costs.py "$MODEL" --artifact "$WORK/small" --new 48 --out $R/step_costs.json
}
step step_costs step_costs

# vLLM, with the allocator that it advises, if it is installed (Debian: libtcmalloc-minimal4); suffix
# decoding is `pip install --no-deps arctic-inference==0.3.0`.
allocator=$(find /usr/lib -name 'libtcmalloc_minimal.so.4' | head -1)
export LD_PRELOAD=$allocator
step vllm_drafts python bench/vllm_speed.py "$MODEL" --what drafts --rounds 12 6 2 \
  --only ngram suffix drafts "drafts, cross-request" --out $R/vllm_drafts.json
step vllm_exits python bench/vllm_speed.py "$MODEL" --what exits --rounds 12 6 2 --new 32 --prompt 64 \
  --out $R/vllm_exits.json
step vllm_drafts_no_amx without_amx python bench/vllm_speed.py "$MODEL" --what drafts \
  --dtype float32 --restart --rounds 50 9 3 --new 48 --only drafts --out $R/vllm_drafts_no_amx.json
step vllm_drafts_no_amx_32 without_amx python bench/vllm_speed.py "$MODEL" --what drafts \
  --dtype float32 --batch 32 --rounds 4 --new 48 --only drafts --out $R/vllm_drafts_no_amx_32.json
step vllm_long_prompts without_amx python bench/vllm_speed.py "$MODEL" --what drafts \
  --dtype float32 --batch 1 --rounds 4 --new 48 --prompt 2000 --join --only drafts \
  --out $R/vllm_long_prompts.json
step vllm_exits_no_amx without_amx python bench/vllm_speed.py "$MODEL" --what exits \
  --dtype float32 --rounds 12 5 2 --batch 1 8 32 --new 32 --prompt 64 \
  --artifact "$WORK/depth_smollm2" --min-layers 8 \
  --only "gates on, no exits" "calibrated exits" --out $R/vllm_exits_no_amx.json
step vllm_load python bench/vllm_load.py "$MODEL" --requests 334 --rates 4 6 8 --out $R/vllm_load.json

unset LD_PRELOAD

# Trust, and kernels.
step hostile python bench/hostile.py --cases 10000 --out $R/hostile.json
step faults python bench/faults.py --kills 20 --out $R/faults.json
step faults_server python bench/faults.py server --model "$MODEL" --out $R/faults_server.json
step faults_worker python bench/faults.py worker --model "$MODEL" --out $R/faults_worker.json
step soak_threads python bench/soak.py "$MODEL" threads --out $R/soak_threads.json
step soak_serve python bench/soak.py "$MODEL" serve --out $R/soak_serve.json
step soak_memory python bench/soak.py "$MODEL" serve --requests 2000 --out $R/soak_memory.json
step soak_memory_stock python bench/soak.py "$MODEL" serve --requests 2000 --stock \
  --out $R/soak_memory_stock.json
step soak_engines python bench/soak.py "$MODEL" serve --engines 2 --eager --requests 1000 \
  --out $R/soak_engines.json
step certify_simulation python bench/certify_simulation.py --out $R/certify_simulation.json
step vllm_simulation python bench/vllm_simulation.py --out $R/vllm_simulation.json
step long_context python bench/long_context.py --out $R/long_context.json
step long_context_smollm2 python bench/long_context.py --model "$MODEL" --lengths 1024 4096 8000 \
  --new-tokens 32 --out $R/long_context_smollm2.json
step kernels tide kernels --target all --out $R/kernels.json
