#!/bin/sh
# The filter beside dnsdist and unbound, with dnsperf: integration/benches/dns.sh target/release/sandbar [SECONDS [TURNS]]
#
# Loads: `local` are names that are refused by the server itself, `cached` are names it has in its cache,
# `miss` are names nobody asked for before, forwarded to NSD. Each turn measures all servers one after another;
# the table has medians. dnsperf and NSD share the machine, so CPU per query is the column to trust.
# `each_record` is the filter with a record for every answer, where the default folds those that are alike.
#
# Everything runs on the loopback of a network namespace of its own.
set -eu

here=$(dirname "$(realpath "$0")")
if [ -z "${SANDBAR_BENCH_INSIDE:-}" ]; then
    "$here/../../deploy/needs.sh" bind9-dnsutils dnsdist dnsperf iproute2 nsd unbound
    namespaces=-n
    [ "$(id -u)" -eq 0 ] || namespaces=-rn
    SANDBAR_BENCH_INSIDE=1 exec unshare "$namespaces" "$0" "$@"
fi
ip link set lo up

sandbar=$(realpath "$1")
seconds=${2:-3}
turns=${3:-3}
dir=$(mktemp -d)
pids=
trap 'for pid in $pids; do kill "$pid" || :; done 2>/dev/null; wait; rm -rf "$dir"' EXIT
cd "$dir"

# Two hundred names are allowed, and bench.example; what is not is refused.
{
    echo 'name = "p"'
    echo '[budget]'
    echo 'dns_bits_per_hour = 4000000000'
    echo '[[allow]]'
    echo 'name = "wild"'
    echo 'dns_bits_per_hour = 4000000000'
    seq 200 | awk 'BEGIN {printf "hosts = [\"*.bench.example\""} {printf ", \"*.zone%d.example\"", $1} END {print "]"}'
} > policy.toml
filter() { # directory, port, more settings
    mkdir -p "$1/policies"
    cp policy.toml "$1/policies/p.toml"
    cat > "$1/sandbar.toml" <<T
policies = "policies"
[log]
dir = "log"
[dns]
upstreams = ["127.0.0.1:5301"]
pre_resolve = false
grid_milliseconds = 0
forwards_per_hour = 4000000000
$3
[[listener]]
mode = "dns"
bind = ["127.0.0.1:$2"]
sandbox = "s"
[[sandbox]]
id = "s"
policies = ["p"]
T
    "$sandbar" serve -c "$1/sandbar.toml" > "$1/out" 2>&1 &
    pids="$pids $!"
}

cat > nsd.conf <<T
server:
 ip-address: 127.0.0.1@5301
 server-count: 1
 username: ""
 chroot: ""
 zonesdir: "$dir"
 database: ""
 zonelistfile: "$dir/zone.list"
 xfrdfile: "$dir/xfrd"
 xfrdir: "$dir"
 pidfile: ""
 logfile: "$dir/nsd.log"
 rrl-ratelimit: 0
remote-control:
 control-enable: no
zone:
 name: bench.example
 zonefile: zone
T
printf '$ORIGIN bench.example.\n$TTL 3600\n@ SOA ns h 1 3600 600 86400 60\n@ NS ns\nns A 93.184.216.34\n* A 93.184.216.34\n' > zone
nsd -d -c nsd.conf > nsd.out 2>&1 &
pids="$pids $!"

filter folded 5310 ''
own=$!
filter each 5311 'fold_seconds = 0'
each=$!

cat > dnsdist.conf <<T
setLocal("127.0.0.1:5312", {reusePort=true})
addLocal("127.0.0.1:5312", {reusePort=true})
newServer({address="127.0.0.1:5301", checkName="up.bench.example.", sockets=8})
getPool(""):setCache(newPacketCache(200000))
allowed = newSuffixMatchNode()
allowed:add("bench.example.")
for at = 1, 200 do allowed:add("zone" .. at .. ".example.") end
addAction(NotRule(SuffixMatchNodeRule(allowed)), RCodeAction(DNSRCode.NXDOMAIN))
T
dnsdist --supervised --disable-syslog -C dnsdist.conf > dnsdist.out 2>&1 &
dist=$!
pids="$pids $dist"

{
    cat <<T
server:
 do-daemonize: no
 username: ""
 chroot: ""
 pidfile: ""
 use-syslog: no
 logfile: "$dir/unbound.log"
 num-threads: 2
 so-reuseport: yes
 interface: 127.0.0.1@5313
 do-not-query-localhost: no
 module-config: "iterator"
 msg-cache-size: 64m
 rrset-cache-size: 128m
 local-zone: "evil.example." always_nxdomain
T
    seq 200 | awk '{printf " local-zone: \"zone%d.example.\" transparent\n", $1}'
    printf 'forward-zone:\n name: "."\n forward-addr: 127.0.0.1@5301\n'
} > unbound.conf
unbound -d -c unbound.conf > unbound.out 2>&1 &
bound=$!
pids="$pids $bound"

for port in 5301 5310 5311 5312 5313; do
    tries=0
    until dig +time=1 +tries=1 -p "$port" @127.0.0.1 up.bench.example A 2>/dev/null | grep -q 93.184.216.34; do
        tries=$((tries + 1))
        [ "$tries" -lt 100 ] || { echo "nobody answers at port $port" >&2; cat ./*.out ./*/out ./*.log >&2; exit 1; }
        sleep 0.1
    done
done

seq 10000 | sed 's/.*/n&.evil.example A/' > local
seq 2000 | sed 's/.*/n&.bench.example A/' > cached
ticks() { awk '{print $14 + $15}' "/proc/$1/stat"; }
one() { # server, pid, port, load, file, file for latency
    before=$(ticks "$2")
    dnsperf -s 127.0.0.1 -p "$3" -d "$5" -c 8 -q 256 -l "$seconds" > out 2>/dev/null
    after=$(ticks "$2")
    # A server that answers something else is not measured at all.
    expected=NOERROR
    [ "$4" != local ] || expected=NXDOMAIN
    awk -v rcode="$expected" '/Response codes/ {for (at = 3; at < NF; at++) if ($at == rcode) good = substr($(at + 2), 2) + 0}
        END {exit good < 99.9}' out || { echo "$1 does not answer $4 with $expected" >&2; cat out >&2; exit 1; }
    awk -v load="$4" -v server="$1" -v ticks="$((after - before))" -v hertz="$(getconf CLK_TCK)" '
        /Queries sent/ {sent = $3} /Queries completed/ {done = $3} /Queries per second/ {rate = $4}
        END {print load, server, "rate", rate; print load, server, "cpu", ticks * 1e6 / hertz / done
             print load, server, "lost", 100 * (sent - done) / sent}' out >> figures
    # Latency: each query's own, at a rate that leaves everybody idle for most of the time.
    dnsperf -v -s 127.0.0.1 -p "$3" -d "$6" -c 8 -q 256 -Q 2000 -l "$seconds" 2>/dev/null |
        awk '$1 == ">" {print $NF * 1e6}' | sort -n > latency
    awk -v load="$4" -v server="$1" '{at[NR] = $1} END {
        print load, server, "p50", at[int(NR * 0.5) + 1]; print load, server, "p99", at[int(NR * 0.99) + 1]}' latency >> figures
}

each_server() { # load, file, file for latency
    one sandbar "$own" 5310 "$1" "$2" "$3"
    one each_record "$each" 5311 "$1" "$2" "$3"
    one dnsdist "$dist" 5312 "$1" "$2" "$3"
    one unbound "$bound" 5313 "$1" "$2" "$3"
}
for turn in $(seq "$turns"); do
    each_server local local local
    for port in 5310 5311 5312 5313; do # the caches are filled
        dnsperf -s 127.0.0.1 -p "$port" -d cached -n 1 >/dev/null 2>&1
    done
    each_server cached cached cached
    seq $((100000 * seconds)) | sed "s/.*/m$turn-&.bench.example A/" > miss
    seq $((4000 * seconds)) | sed "s/.*/l$turn-&.bench.example A/" > miss-slow
    each_server miss miss miss-slow
done

sort -k1,3 -k4n figures | awk '
    {key = $1 " " $2 " " $3; if (key != last) {flush(); last = key; count = 0} value[++count] = $4}
    function flush() {
        if (count) median[last] = count % 2 ? value[(count + 1) / 2] : (value[count / 2] + value[count / 2 + 1]) / 2
    }
    function of(load, server, what) {return median[load " " server " " what]}
    function ratio(load, server, other, what) {return of(load, server, what) / of(load, other, what)}
    function bar(text, found, sign, limit) {
        met = sign == "least" ? found >= limit : found <= limit
        printf "  %-52s %5.2f, at %s %.2f: %s\n", text, found, sign, limit, met ? "met" : "MISSED"
    }
    END {
        flush()
        split("local cached miss", loads, " "); split("sandbar each_record dnsdist unbound", servers, " ")
        printf "%-7s %-12s %8s %8s %8s %8s %7s | of dnsdist: rate   CPU   p50   p99 | of unbound: rate   CPU\n", "load", "server", "qps", "CPU us", "p50 us", "p99 us", "lost %"
        for (l = 1; l <= 3; l++) for (s = 1; s <= 4; s++) {
            load = loads[l]; server = servers[s]
            printf "%-7s %-12s %8d %8.2f %8d %8d %7.3f |           %6.2f %5.2f %5.2f %5.2f |           %6.2f %5.2f\n", load, server,
                of(load, server, "rate"), of(load, server, "cpu"), of(load, server, "p50"), of(load, server, "p99"), of(load, server, "lost"),
                ratio(load, server, "dnsdist", "rate"), ratio(load, server, "dnsdist", "cpu"), ratio(load, server, "dnsdist", "p50"), ratio(load, server, "dnsdist", "p99"),
                ratio(load, server, "unbound", "rate"), ratio(load, server, "unbound", "cpu")
        }
        print "\nsandbar, with its log on:"
        for (l = 1; l <= 2; l++) {
            bar(loads[l] ": rate of dnsdist", ratio(loads[l], "sandbar", "dnsdist", "rate"), "least", 1.0)
            bar(loads[l] ": CPU per query of dnsdist", ratio(loads[l], "sandbar", "dnsdist", "cpu"), "most", 0.9)
        }
        bar("miss: rate of dnsdist", ratio("miss", "sandbar", "dnsdist", "rate"), "least", 0.9)
        bar("miss: rate of unbound", ratio("miss", "sandbar", "unbound", "rate"), "least", 2.0)
        for (l = 1; l <= 3; l++) bar(loads[l] ": p99 at 2,000 qps of dnsdist", ratio(loads[l], "sandbar", "dnsdist", "p99"), "most", 1.5)
        record = of("cached", "each_record", "cpu") - of("cached", "sandbar", "cpu")
        miss = of("miss", "sandbar", "cpu")
        printf "\nlogging: a record costs %.2f us of CPU (cached answers, one record each against folded ones).\n", record
        printf "A miss writes two, %.0f %% of its %.2f us.\n", 200 * record / miss, miss
    }'
