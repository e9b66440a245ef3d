#!/usr/bin/env bash
# The proxy beside its peers, in one run: plain requests kept alive (rate, CPU for each, log on), and a bulk
# download through CONNECT (CPU for each GB). Ratios are to direct and to the best peer of that row.
#   integration/benches/proxy.sh BIN [SECONDS]
set -euo pipefail
bin=$(realpath "${1:?say where the binary is}")
seconds=${2:-5}
here=$(cd "$(dirname "$0")/../.." && pwd)
"$here/deploy/needs.sh" curl haproxy nginx-light squid-openssl wrk

if [ -z "${SANDBAR_BENCH_INSIDE:-}" ]; then
    exec env SANDBAR_BENCH_INSIDE=1 unshare --net -- "$0" "$bin" "$seconds" # nothing leaves, no port is taken
fi
ip link set lo up
dir=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait; rm -rf "$dir"' EXIT
chmod 755 "$dir"
mkdir -p "$dir/www" "$dir/policies"
head -c 1024 /dev/zero | tr '\0' x > "$dir/www/1k"
head -c 1000000000 /dev/zero > "$dir/www/1g"

cat > "$dir/nginx.conf" <<C
daemon off; worker_processes 1; pid $dir/nginx.pid; error_log $dir/nginx.err;
events {}
http { access_log off; keepalive_requests 1000000; sendfile on; root $dir/www;
  client_body_temp_path $dir/t; proxy_temp_path $dir/t; fastcgi_temp_path $dir/t; uwsgi_temp_path $dir/t; scgi_temp_path $dir/t;
  server { listen 127.0.0.1:8080; } }
C
cat > "$dir/haproxy.cfg" <<C
global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend f
  bind 127.0.0.1:3001
  http-request deny if !{ req.hdr(host) -m beg a.example }
  http-request set-uri %[path]
  default_backend b
backend b
  http-reuse always
  server s 127.0.0.1:8080
C
cat > "$dir/squid.conf" <<C
http_port 127.0.0.1:3002
acl ok dstdomain a.example
http_access allow ok
http_access deny all
hosts_file $dir/hosts
acl ports port 8080
cache deny all
access_log none
cache_log $dir/squid.log
pid_filename $dir/squid.pid
coredump_dir $dir
pinger_enable off
C
echo "127.0.0.1 a.example" > "$dir/hosts"
cat > "$dir/sandbar.toml" <<C
policies = "policies"
[log]
dir = "log"
[dns]
upstreams = ["127.0.0.1:9"]
[[dns.host]]
name = "a.example"
addresses = ["127.0.0.1"]
[[dns.host]]
name = "b.example"
addresses = ["127.0.0.1"]
[[listener]]
mode = "explicit"
bind = ["127.0.0.1:3003"]
sandbox = "bench"
[[sandbox]]
id = "bench"
base = "system"
policies = ["bench"]
C
cat > "$dir/policies/bench.toml" <<C
name = "bench"
[[allow]]
name = "plain"
hosts = ["a.example:8080"]
resolves_to = ["127.0.0.0/8"]
[[allow]]
name = "uninspected"
hosts = ["b.example:8080"]
resolves_to = ["127.0.0.0/8"]
inspect = false
signals = { secrets = "off", memory_flow = "off", headers = "off", url = "off", body = "off" }
[[allow]]
name = "bytes"
hosts = ["a.example"]
tcp = [8081]
resolves_to = ["127.0.0.0/8"]
C
# A small request as SDKs send it: 1 KiB of JSON and 15 fields. And 64 MiB of text.
for host in direct a b; do
    to=http://$host.example:8080; [ "$host" != direct ] || to=
    cat > "$dir/small-$host.lua" <<C
local body = '{"text":"' .. string.rep("a plain word ", 78) .. '"}'
local fields = { Host = "${host/direct/a}.example:8080", ["Content-Type"] = "application/json" }
for at = 1, 12 do fields["X-Field-" .. at] = "value of field " .. at end
request = function() return wrk.format("POST", "$to/small", fields, body) end
C
done
awk 'BEGIN { while (at++ < 64 * 1048576 / 60) print "Every line of this text is unlike the last, " at * 7919 % 99991 " times." }' | head -c 67108864 > "$dir/64m"
sed -i 's|listen 127.0.0.1:8080;|listen 127.0.0.1:8080; client_max_body_size 100m; location /small { return 204; } location /sink { proxy_pass http://127.0.0.1:8082; }|' "$dir/nginx.conf"
sed -i 's|^  server {|  server { listen 127.0.0.1:8082; client_max_body_size 100m; location / { return 204; } }\n&|' "$dir/nginx.conf"
sed -i 's/listen 127.0.0.1:8080;/listen 127.0.0.1:8080; listen 127.0.0.1:8081;/' "$dir/nginx.conf"
cat > "$dir/absolute.lua" <<'C'
request = function() return wrk.format("GET", "http://a.example:8080/1k", { Host = "a.example:8080" }) end
C

start() { "$@" > "$dir/started.log" 2>&1 & last=$!; pids+=("$last"); }
until_open() { for _ in $(seq 200); do (exec 3<> "/dev/tcp/127.0.0.1/$1") 2> /dev/null && return; sleep 0.05; done; echo "nothing listens on $1: $(cat "$dir/started.log")" >&2; exit 1; }
# CPU of a process and its children, in microseconds.
cpu() { local sum=0 pid; for pid in "$1" $(pgrep -P "$1" || true); do sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat"))); done; echo $((sum * 10000)); }

start nginx -c "$dir/nginx.conf"; until_open 8080
start haproxy -f "$dir/haproxy.cfg"; haproxy=$last; until_open 3001
chown proxy "$dir" 2> /dev/null || true
start squid -N -f "$dir/squid.conf"; squid=$last; until_open 3002
chown "$(id -u)" "$dir"
start "$bin" serve -c "$dir/sandbar.toml"; sandbar=$last; until_open 3003

row() { # name pid port: rate and CPU of plain requests
    local url=http://127.0.0.1:$3/1k script=() before after said rate count
    [ "$1" = direct ] || { script=(-s "$dir/absolute.lua"); url=http://127.0.0.1:$3/; }
    before=$(cpu "$2"); said=$(wrk -t1 -c16 -d"${seconds}s" "${script[@]}" "$url"); after=$(cpu "$2")
    rate=$(awk '/Requests\/sec/ { print int($2) }' <<< "$said"); count=$(awk '/requests in/ { print $1 }' <<< "$said")
    grep -q 'Non-2xx' <<< "$said" && { echo "$1 refused what it must allow: $said" >&2; exit 1; }
    echo "$1 $rate $(awk "BEGIN { printf \"%.1f\", ($after - $before) / $count }")"
}
bulk() { # name pid proxy: CPU seconds for a GB through a tunnel
    local before after took
    before=$(cpu "$2")
    took=$(curl -sS -o /dev/null -w '%{time_total}' ${3:+-p -x "$3" --resolve a.example:8081:127.0.0.1} http://a.example:8081/1g --resolve a.example:8081:127.0.0.1)
    after=$(cpu "$2")
    awk "BEGIN { printf \"%s %.1f %.2f\n\", \"$1\", 8 / $took, ($after - $before) / 1e6 }"
}

echo "plain requests kept alive, 1 KiB, 16 connections, ${seconds} s each (Sandbar with its log on)"
rows=$(row direct "${pids[0]}" 8080; row haproxy "$haproxy" 3001; row squid "$squid" 3002; row sandbar "$sandbar" 3003)
awk '{ rate[$1] = $2; cpu[$1] = $3 } END {
    printf "%-8s %9s %10s %8s\n", "", "rate/s", "of direct", "CPU us"
    split("direct haproxy squid sandbar", names, " ")
    for (at = 1; at <= 4; at++) { n = names[at]; printf "%-8s %9d %10.2f %8s\n", n, rate[n], rate[n] / rate["direct"], n == "direct" ? "-" : cpu[n] }
    printf "sandbar: %.2f of the rate of haproxy, %.2f of squid; CPU %.2f of haproxy, %.2f of squid\n",
        rate["sandbar"] / rate["haproxy"], rate["sandbar"] / rate["squid"], cpu["sandbar"] / cpu["haproxy"], cpu["sandbar"] / cpu["squid"]
}' <<< "$rows"
echo
echo "1 GB through CONNECT: Gbit/s, CPU seconds of the proxy"
bulk direct "${pids[0]}" ""
bulk sandbar "$sandbar" http://127.0.0.1:3003

# Alternating turns in one run, so that what else the machine does falls on both alike. One connection: latency.
turns=5
small() { # host: microseconds of each request, the best of this turn
    local port=3003 said; [ "$1" != direct ] || port=8080
    said=$(wrk -t1 -c1 -d1s -s "$dir/small-$1.lua" "http://127.0.0.1:$port/")
    grep -q 'Non-2xx' <<< "$said" && { echo "$1 refused what it must allow: $said" >&2; exit 1; }
    awk -v host="$1" '/Requests\/sec/ { printf "%s %.1f\n", host, 1e6 / $2 }' <<< "$said"
}
large() { # host: seconds for 64 MiB
    local proxy=(-x http://127.0.0.1:3003) to=$1; [ "$1" != direct ] || { proxy=(); to=a; }
    curl -sS -f -o /dev/null -w "$1 %{time_total}\n" "${proxy[@]}" --resolve "$to.example:8080:127.0.0.1" -T "$dir/64m" "http://$to.example:8080/sink"
}
echo
echo "inspection, in $turns alternating turns: a request of 1 KiB and 15 fields kept alive on one connection; 64 MiB of text"
small b > /dev/null # both kinds of request are known from now on
small a > /dev/null
for _ in $(seq "$turns"); do small direct; small a; small b; done > "$dir/small"
for _ in $(seq "$turns"); do large direct; large a; large b; done > "$dir/large"
for kind in small large; do
    awk -v kind="$kind" '{ if (!($1 in best) || $2 < best[$1]) best[$1] = $2 } END {
        if (kind == "small") printf "small: direct %.1f us, not inspected %.1f us, inspected %.1f us: %.1f us added, ratio %.2f (at most 15 us)\n", best["direct"], best["b"], best["a"], best["a"] - best["b"], best["a"] / best["b"]
        else printf "64 MiB: direct %.2f GB/s, not inspected %.2f GB/s, inspected %.2f GB/s, ratio %.2f\n", 0.0671 / best["direct"], 0.0671 / best["b"], 0.0671 / best["a"], best["b"] / best["a"]
    }' "$dir/$kind"
done
