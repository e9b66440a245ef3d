// One TLS handshake a line of the file of cases; one line of answer each.
package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"
)

func shake(expects, ip, port, trusts string) string {
	pem, err := os.ReadFile(trusts)
	if err != nil {
		return err.Error()
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	connection, err := tls.Dial("tcp", net.JoinHostPort(ip, port), &tls.Config{RootCAs: roots, ServerName: expects})
	if err != nil {
		return strings.ReplaceAll(err.Error(), "\n", " ")
	}
	connection.Close()
	return "ok"
}

func main() {
	file, err := os.Open(os.Args[1])
	if err != nil {
		panic(err)
	}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		fmt.Println(shake(fields[0], fields[1], fields[2], fields[3]))
	}
}
