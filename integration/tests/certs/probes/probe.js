// One TLS handshake a line of the file of cases; one line of answer each.
const fs = require('fs');
const net = require('net');
const tls = require('tls');

function shake(expects, ip, port, trusts) {
  return new Promise((resolve) => {
    const options = { host: ip, port: Number(port), ca: fs.readFileSync(trusts), timeout: 20000 };
    // Node sends no SNI for an address, but then verifies the address it dialled.
    if (!net.isIP(expects)) options.servername = expects;
    else options.checkServerIdentity = (_, certificate) => tls.checkServerIdentity(expects, certificate);
    const socket = tls.connect(options, () => { socket.destroy(); resolve('ok'); });
    socket.on('error', (error) => resolve(String(error.message).split('\n')[0] || 'error'));
  });
}

(async () => {
  for (const line of fs.readFileSync(process.argv[2], 'utf8').trim().split('\n')) {
    console.log(await shake(...line.split(' ')));
  }
})();
