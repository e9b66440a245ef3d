# Two commands do everything on a fresh machine: `make demo` and `make test`.
CARGO ?= cargo
DEMO_PACKAGES := cmake gcc libc6-dev make
TEST_PACKAGES := $(DEMO_PACKAGES) bind9-dnsutils ca-certificates chromium curl dns2tcp gdb git iodine iproute2 libfaketime libnss3-tools nftables nginx-light nodejs npm openssl procps python3 python3-aiohttp python3-grpcio python3-h2 python3-httpx python3-jsonschema python3-pip python3-requests python3-venv python3-websockets rsyslog unbound vim wget

.PHONY: demo test proptest lint bench needs-demo needs-test

demo: needs-demo
	$(CARGO) build --quiet --release -p cli
	$(or $(CARGO_TARGET_DIR),target)/release/sandbar demo

# Building the tests of `cli` builds the binary too, so the whole-program tests need not.
test: export SANDBAR_BIN = $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/debug/sandbar
test: needs-test lint
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
		$(CARGO) nextest run --workspace --no-fail-fast; \
	else \
		$(CARGO) test --workspace --no-fail-fast; \
	fi
	$(CARGO) test --workspace --doc

# `make test` tries the same inputs in every run, by the seed in .cargo/config.toml. This draws a new seed and gives
# every property test CASES inputs: about seven minutes on two cores, and in proportion. It prints the seed first,
# so that `make proptest SEED=...` repeats a run. The input that a failure ends with belongs into a test of its own.
CASES ?= 5000
proptest: export PROPTEST_CASES = $(CASES)
proptest: export PROPTEST_RNG_SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
proptest:
	@echo "SEED=$$PROPTEST_RNG_SEED CASES=$$PROPTEST_CASES"
	$(CARGO) test --no-fail-fast -p audit -p certs -p dns-filter -p proxy -p rules --lib --tests

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

bench: needs-demo
	$(CARGO) build --quiet --release -p cli
	integration/benches/dns.sh target/release/sandbar
	integration/benches/proxy.sh target/release/sandbar
	$(CARGO) bench --workspace

needs-demo:
	@deploy/needs.sh $(DEMO_PACKAGES)

needs-test:
	@deploy/needs.sh $(TEST_PACKAGES)
	@target/memory-engine/bin/python -c 'import astrocyte' 2>/dev/null || deploy/memory-engine.sh target/memory-engine
