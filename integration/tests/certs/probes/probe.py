# One TLS handshake a line of the file of cases; one line of answer each.
import socket
import ssl
import sys

for line in open(sys.argv[1]):
    expects, ip, port, trusts = line.split()
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(trusts)
        with socket.create_connection((ip, int(port)), timeout=20) as plain:
            with context.wrap_socket(plain, server_hostname=expects):
                print("ok")
    except ssl.SSLError as error:
        print(str(error).replace("\n", " "))
