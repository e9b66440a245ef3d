"""Writes down every DNS message over UDP that an interface carries: witness.py INTERFACE PORT FILE

One line of JSON each: the client's port, the id, the name, the type, and the rcode of an answer.
It stands on the wire, so it knows nothing of what the filter believes.
"""

import json
import socket
import struct
import sys

OUTGOING = 4
ETH_P_ALL = 3  # any other protocol shows only what comes in
ETH_P_IP = 0x0800


def message(packet, port):
    """The DNS message in an IPv4 packet to or from `port`, or none."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_UDP:
        return None
    udp = packet[(packet[0] & 15) * 4 :]
    source, target = struct.unpack(">HH", udp[:4])
    data = udp[8:]
    if port not in (source, target) or len(data) < 12:
        return None
    number, flags, questions = struct.unpack(">HHH", data[:6])
    if questions != 1:
        return None
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1").lower())
        at += 1 + data[at]
    kind = struct.unpack(">H", data[at + 1 : at + 3])[0]
    seen = {"id": number, "name": ".".join(labels), "kind": kind}
    if flags >> 15:
        return seen | {"port": target, "rcode": flags & 15}
    return seen | {"port": source, "rcode": None}


def main():
    interface, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    wire.bind((interface, ETH_P_ALL))
    with open(path, "w", encoding="ascii") as log:
        print("watching", flush=True)
        while True:
            packet, address = wire.recvfrom(65535)
            if address[1] != ETH_P_IP or (interface == "lo" and address[2] == OUTGOING):
                continue  # loopback shows each packet twice
            try:
                seen = message(packet, port)
            except (IndexError, struct.error):
                continue  # no DNS
            if seen:
                print(json.dumps(seen), file=log, flush=True)


main()
