"""Sends secrets in names below a domain, each query as if by a stub resolver, and prints the names sent.

sender.py SERVER DOMAIN greedy
    As much as the budget lets pass: the longest name first, and a shorter one whenever it is refused.
sender.py SERVER DOMAIN slow LETTERS SECONDS HOURS CLOCK
    LETTERS of base32 every SECONDS for HOURS; CLOCK is the file that tells the filter how far its clock is ahead.

Each line: the hour, then the name.
"""

import os
import random
import socket
import struct
import sys

BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
NXDOMAIN = 3
TRIES = 5
WAIT = 10.0


def name(letters, domain):
    """A name with so many random letters below the domain, in labels as long as they may be."""
    text = "".join(random.choices(BASE32, k=letters))
    return ".".join([text[at : at + 63] for at in range(0, letters, 63)] + [domain])


def ask(server, asked):
    """Asks for the address and waits for the rcode; a lost datagram is sent again."""
    wire = b"".join(bytes([len(label)]) + label.encode() for label in asked.split("."))
    number = random.getrandbits(16)
    query = struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + wire + b"\0\0\1\0\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(WAIT)
        client.connect((server, 53))
        for _ in range(TRIES):
            client.send(query)
            try:
                answer = client.recv(4096)
            except TimeoutError:
                continue
            if answer[:2] == query[:2]:
                return answer[3] & 15
    sys.exit(f"no answer for {asked}")


def greedy(server, domain):
    longest = 253 - len(domain) - 1
    letters = longest - longest // 64
    while letters:
        asked = name(letters, domain)
        if ask(server, asked) == NXDOMAIN:
            letters = letters * 3 // 4
        else:
            print(0, asked)


def slow(server, domain, letters, seconds, hours, clock):
    for turn in range(hours * 3600 // seconds):
        with open(clock + ".new", "w", encoding="ascii") as file:
            print(f"+{turn * seconds}", file=file)
        os.rename(clock + ".new", clock)
        asked = name(letters, domain)
        ask(server, asked)
        print(turn * seconds // 3600, asked)


if sys.argv[3] == "greedy":
    greedy(sys.argv[1], sys.argv[2])
else:
    slow(sys.argv[1], sys.argv[2], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]), sys.argv[7])
