// One TLS handshake a line of the file of cases; one line of answer each.
import java.io.FileInputStream;
import java.net.Socket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLParameters;
import javax.net.ssl.SSLSocket;
import javax.net.ssl.TrustManagerFactory;

public class Probe {
    public static void main(String[] arguments) throws Exception {
        for (String line : Files.readAllLines(Path.of(arguments[0]))) {
            String[] fields = line.split(" ");
            System.out.println(shake(fields[0], fields[1], Integer.parseInt(fields[2]), fields[3]));
        }
    }

    static String shake(String expects, String ip, int port, String trusts) {
        try (Socket plain = new Socket(ip, port)) {
            SSLSocket socket = (SSLSocket) context(trusts).getSocketFactory().createSocket(plain, expects, port, true);
            SSLParameters parameters = socket.getSSLParameters();
            parameters.setEndpointIdentificationAlgorithm("HTTPS");
            socket.setSSLParameters(parameters);
            socket.setSoTimeout(20000);
            socket.startHandshake();
            return "ok";
        } catch (Exception error) {
            return error.toString().replace('\n', ' ');
        }
    }

    static SSLContext context(String trusts) throws Exception {
        KeyStore store = KeyStore.getInstance("PKCS12");
        store.load(null, null);
        try (FileInputStream file = new FileInputStream(trusts)) {
            store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(file));
        }
        TrustManagerFactory factory = TrustManagerFactory.getInstance("PKIX");
        factory.init(store);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, factory.getTrustManagers(), null);
        return context;
    }
}
