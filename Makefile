# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
CARGO ?= cargo
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
FUZZ_SECONDS ?= 30
MEMORY_ENGINE := target/memory-engine
MODEL_CLIENTS := target/model-clients
AWS_SDK := target/aws-sdk

DEMO_PACKAGES := cmake gcc libc6-dev make
TEST_PACKAGES := $(DEMO_PACKAGES) bind9-dnsutils ca-certificates chromium curl dns2tcp gdb git iodine iproute2 libfaketime libnss3-tools nftables nginx-light nodejs npm openssl procps python3 python3-aiohttp python3-grpcio python3-h2 python3-httpx python3-jsonschema python3-pip python3-requests python3-venv python3-websockets rsyslog unbound vim wget

.PHONY: help demo test proptest lint lint-text bench fuzz mutants advisories setup setup-demo check-demo check-test

help:
	@echo 'make demo        builds Sandbar and shows what it does, with real traffic on loopback'
	@echo 'make test        runs clippy, the other lints but rustdoc, and every test'
	@echo 'make proptest    runs the property tests with random inputs, and prints the seed'
	@echo 'make lint        checks format, dependencies, layers, keys, clippy and rustdoc'
	@echo 'make bench       measures throughput, latency, memory and the rates of alarms'
	@echo 'make fuzz        runs each fuzz target for FUZZ_SECONDS ($(FUZZ_SECONDS))'
	@echo 'make mutants     changes the code that decides and parses, and lists the changes that no test notices'
	@echo 'make advisories  looks for known vulnerabilities in dependencies; needs the network'
	@echo 'make setup       installs what the tests need; `make test` runs it when something is missing'

demo: check-demo
	@[ -e $(TARGET)/demo/sandbar ] || echo 'sandbar: the first build takes three to five minutes on two cores'
	$(CARGO) build --profile demo -p cli
	$(TARGET)/demo/sandbar demo

# Building the tests of `cli` builds the binary too, so the whole-program tests need not. Clippy looks on while the
# tests are compiled, as `cargo clippy` does it: run apart, it would compile every dependency a second time.
test: export SANDBAR_BIN = $(TARGET)/debug/sandbar
test: export RUSTC_WORKSPACE_WRAPPER = $(shell rustc --print sysroot)/bin/clippy-driver
test: export CLIPPY_ARGS = -Dwarnings
test: check-test lint-text
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

lint-text:
	$(CARGO) fmt --all --check
	lints/dependencies.py
	lints/layers.py
	lints/keys.py

lint: lint-text
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --document-private-items

bench: check-demo
	@[ -e $(TARGET)/release/sandbar ] || echo 'sandbar: the first optimised build takes about ten minutes on two cores'
	$(CARGO) build --release -p cli
	integration/benches/dns.sh $(TARGET)/release/sandbar
	integration/benches/proxy.sh $(TARGET)/release/sandbar
	integration/benches/signals.sh $(TARGET)/release/sandbar
	$(CARGO) bench --workspace

fuzz:
	@$(CARGO) +nightly fuzz --version >/dev/null 2>&1 || { \
		echo 'sandbar: make fuzz needs a nightly toolchain and cargo-fuzz; run:' >&2; \
		echo '    rustup toolchain install nightly && cargo install cargo-fuzz' >&2; \
		exit 1; \
	}
	@[ -e $(TARGET)/fuzz ] || echo 'sandbar: the first build, with the address sanitizer, takes about fifteen minutes on two cores'
	@failed=; for file in */fuzz/fuzz_targets/*.rs; do \
		crate=$${file%%/*}; name=$$(basename $$file .rs); \
		echo "sandbar: fuzzing $$name of $$crate for $(FUZZ_SECONDS) s"; \
		(cd $$crate && $(CARGO) +nightly fuzz run --target-dir $(TARGET)/fuzz $$name -- -max_total_time=$(FUZZ_SECONDS)) || failed="$$failed $$crate/$$name"; \
	done; \
	[ -z "$$failed" ] || { echo "sandbar: failing inputs in fuzz/artifacts, for:$$failed" >&2; exit 1; }

# Some 1,700 changes to the code that decides and to the parsers: a night on two cores. FILES=rules/src/decide.rs takes
# twenty minutes. The changes that no test notices end up in target/mutants.out/missed.txt; rules/MUTANTS.md lists those
# that no test can notice.
FILES ?= rules/src/admit.rs rules/src/decide.rs rules/src/host_agreement.rs rules/src/load/*.rs rules/src/memory.rs \
	rules/src/name.rs rules/src/network.rs rules/src/pattern.rs rules/src/permit.rs rules/src/treatment.rs \
	rules/src/url_path.rs proxy/src/accept/detect.rs proxy/src/http/chunks.rs proxy/src/http/head.rs \
	proxy/src/memory/form.rs proxy/src/memory/json.rs dns-filter/src/clean.rs dns-filter/src/message.rs
mutants:
	@$(CARGO) mutants --version >/dev/null 2>&1 || { \
		echo 'sandbar: make mutants needs cargo-mutants; run:' >&2; \
		echo '    cargo install cargo-mutants --locked' >&2; \
		exit 1; \
	}
	$(CARGO) mutants --output target $(addprefix --file ,$(wildcard $(FILES)))

# Apart from `make lint`, because the database of advisories has to be fetched.
advisories:
	@$(CARGO) deny --version >/dev/null 2>&1 || { \
		echo 'sandbar: make advisories needs cargo-deny; run:' >&2; \
		echo '    cargo install cargo-deny --locked' >&2; \
		exit 1; \
	}
	@echo 'sandbar: cargo-deny fetches the RustSec database; this needs the network'
	$(CARGO) deny check advisories

setup:
	@deploy/needs.sh $(TEST_PACKAGES)
	@deploy/memory-engine.sh $(MEMORY_ENGINE)
	@deploy/model-clients.sh $(MODEL_CLIENTS)
	@deploy/aws-sdk.sh $(AWS_SDK)

setup-demo:
	@deploy/needs.sh $(DEMO_PACKAGES)

check-demo:
	@deploy/needs.sh --check $(DEMO_PACKAGES) || $(MAKE) --no-print-directory setup-demo

check-test:
	@deploy/needs.sh --check $(TEST_PACKAGES) && deploy/memory-engine.sh --check $(MEMORY_ENGINE) && deploy/model-clients.sh --check $(MODEL_CLIENTS) && deploy/aws-sdk.sh --check $(AWS_SDK) || $(MAKE) --no-print-directory setup
	@[ -e $(TARGET)/debug/sandbar ] || echo 'sandbar: the first build, for clippy and the tests, takes about ten minutes on two cores'
