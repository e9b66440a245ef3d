#!/bin/sh
# Rates and CPU per query of the filter, dnsdist and unbound side by side: integration/benches/dns.sh target/release/sandbar
# Loads: L names refused here, C names from the cache. Loopback only; needs dnsperf, dnsdist, unbound.
set -eu
sandbar=$(realpath "$1")
dir=$(mktemp -d)
pids=
trap 'kill $pids 2>/dev/null; wait; rm -rf "$dir"' EXIT
cd "$dir"
mkdir policies
cat > policies/p.toml <<'P'
name = "p"
[[allow]]
name = "wild"
hosts = ["*.bench.example"]
dns_bits_per_hour = 4000000000
[budget]
dns_bits_per_hour = 4000000000
P
cat > sandbar.toml <<'P'
policies = "policies"
[log]
dir = "log"
[dns]
upstreams = ["127.0.0.1:5301"]
pre_resolve = false
grid_milliseconds = 0
forwards_per_hour = 4000000000
[[listener]]
mode = "dns"
bind = ["127.0.0.1:5310"]
sandbox = "s"
[[sandbox]]
id = "s"
policies = ["p"]
P
zone='local-zone: "bench.example." redirect
 local-data: "bench.example. 3600 IN A 93.184.216.34"
 local-zone: "evil.example." always_nxdomain'
printf 'server:\n do-daemonize: no\n username: ""\n chroot: ""\n pidfile: ""\n use-syslog: no\n num-threads: 2\n interface: 127.0.0.1@5301\n %s\n' "$zone" > unbound.conf
printf 'setLocal("127.0.0.1:5311",{reusePort=true})\nnewServer({address="127.0.0.1:5301",checkName="n1.bench.example."})\npc=newPacketCache(100000)\ngetPool(""):setCache(pc)\naddAction({"evil.example."}, RCodeAction(DNSRCode.NXDOMAIN))\n' > dnsdist.conf
for at in $(seq 2000); do echo "n$at.bench.example A"; done > C
for at in $(seq 10000); do echo "n$at.evil.example A"; done > L
unbound -d -c unbound.conf >/dev/null 2>&1 & up=$!
"$sandbar" serve -c sandbar.toml >/dev/null 2>&1 & own=$!
dnsdist --supervised --disable-syslog -C dnsdist.conf >/dev/null 2>&1 & dist=$!
pids="$up $own $dist"
ticks() { awk '{print $14 + $15}' "/proc/$1/stat"; }
one() { # name pid port load
    before=$(ticks "$2")
    dnsperf -s 127.0.0.1 -p "$3" -d "$4" -c 8 -q 256 -l 2 > out 2>/dev/null
    after=$(ticks "$2")
    count=$(awk '/Queries completed/ {print $3}' out)
    rate=$(awk '/Queries per second/ {print int($4)}' out)
    awk -v n="$1" -v l="$4" -v r="$rate" -v t="$((after - before))" -v c="$count" 'BEGIN {printf "%s %-8s %8d qps %6.2f us CPU/query\n", l, n, r, t * 10000 / c}'
}
for port in 5301 5310 5311; do until dig +time=1 +tries=1 -p "$port" @127.0.0.1 n1.bench.example >/dev/null 2>&1; do :; done; done
for load in C L; do for turn in 1 2; do
    one sandbar "$own" 5310 $load; one dnsdist "$dist" 5311 $load; one unbound "$up" 5301 $load
done; done
