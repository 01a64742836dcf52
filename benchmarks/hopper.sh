#!/bin/bash
# Everything that needs a Hopper GPU, part by part, each with a time limit, so that a short visit starts with what matters:
#
#     bash benchmarks/hopper.sh                    # all parts
#     bash benchmarks/hopper.sh quick tune         # some of: quick tests tune linears step bars prefill gptq sanitize
#
# A machine without a network: the package is installed as it lies here. Results go to $OUT (benchmarks/results without it);
# a table or a count comes last in every part.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
commit=${COMMIT:-$(git rev-parse --short=8 HEAD 2>/dev/null || echo unknown)}
export COMMIT=$commit  # for benchmarks that ask git
parts=${*:-quick tests tune linears step prefill gptq sanitize}
export PYTHONUNBUFFERED=1
python3 -c 'import fu_compile.lowerings' 2>/dev/null ||
    python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit 1
# SmolLM2's GGUF file (98 MB) in two parts for two visits while the machine is kept: .smol/part0, .smol/part1 and gguf's wheel.
cp .smol/part? /tmp/ 2>/dev/null
if test -f /tmp/part0 -a -f /tmp/part1; then
    cat /tmp/part0 /tmp/part1 >/tmp/smollm2.gguf
    python3 -m pip install -q --no-index --no-deps .smol/gguf-*.whl
    export FU_SMOLLM2=/tmp/smollm2.gguf
fi
nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,power.draw --format=csv,noheader

run() { # seconds, log, command: what fails is said and does not stop the rest
    local limit=$1 log=$2
    shift 2
    timeout "$limit" "$@" 2>&1 | tee "$out/$log.log" | tail -40
    local rc=${PIPESTATUS[0]}
    test "$rc" = 0 || echo "FAILED ($rc): $*"
}

for part in $parts; do
    echo "== $part"
    case $part in
    quick) run 90 quick python3 benchmarks/decode_linears.py --models 8b --quick-check --only-check ;;
    tests) run 300 tests python3 -m pytest -q -m gpu tests/gpu -n 8 ;; # 5 minutes: decode_linears 1, gemm and attention 2, end_to_end 2
    tune)
        # 25 to 45 s each. With one copy a strip not yet tuned: 32 tokens, 70B at one. Never tuned: 2, 4 and 16 tokens.
        for case in 8b:32 70b:32 70b:1 8b:16 8b:4 8b:2 8b:1 8b:8 70b:8; do
            run 90 "tune-${case/:/-}" python3 benchmarks/decode_linears.py --no-check --rounds 1 --each 12 --seconds 0.015 --tune "$case" \
                --out "$out/tune-${case/:/-}.json"
        done
        cp lowerings/tuned_int4_sm90.py "$out/tuned_int4_sm90.txt"
        ;;
    linears)
        run 180 linears python3 benchmarks/decode_linears.py --no-check --commit "$commit" --out "$out/decode_linears.json"
        run 40 timeline python3 benchmarks/decode_linears.py --no-check --timeline 8b:1 8b:8 8b:32 70b:8 70b:32 --commit "$commit" \
            --out "$out/decode_linears_timeline.json"
        ;;
    step) run 180 step python3 benchmarks/end_to_end.py --no-prefill --commit "$commit" --out "$out" ;;
    bars) run 60 bars python3 benchmarks/prefill_gemm.py --bars --no-compile --commit "$commit" --out "$out" ;;
    prefill)
        run 240 gemm python3 benchmarks/prefill_gemm.py --commit "$commit" --out "$out"
        run 180 prefill python3 benchmarks/end_to_end.py --only-prefill --commit "$commit" --out "$out"
        ;;
    gptq) run 300 gptq python3 benchmarks/gptq_8b.py --blocks "${BLOCKS:-4}" --out "$out" ;;
    sanitize)
        for tool in memcheck racecheck; do
            run 200 "$tool" compute-sanitizer --report-api-errors no --tool $tool \
                python3 -m pytest -q -m gpu tests/gpu/test_decode_linears.py -k "37x200 or 1x8"
            run 100 "$tool-gemm" compute-sanitizer --report-api-errors no --tool $tool \
                python3 benchmarks/prefill_gemm.py --check --quick
            run 100 "$tool-prefill" compute-sanitizer --report-api-errors no --tool $tool \
                python3 -m pytest -q -m gpu tests/gpu/test_gemm.py -k "test_mlp or (test_codes and 576) or (rope and norms)"
        done
        ;;
    *) echo "no part $part" ;;
    esac
done
