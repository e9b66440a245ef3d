"""Sends random packets into a tunnel until it is stopped: pump.py ADDRESS BYTES"""

import os
import socket
import sys
import time

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tunnel:
    print("pumping", flush=True)
    while True:
        tunnel.sendto(os.urandom(int(sys.argv[2])), (sys.argv[1], 9))
        time.sleep(0.05)  # a tunnel drops what comes faster
