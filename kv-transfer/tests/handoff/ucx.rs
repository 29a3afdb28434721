//! What is UCX's alone.

use std::sync::atomic::Ordering;

use baton_kv_transfer::memory::FrameMemory;
use baton_kv_transfer::transport::ucx::{UcxConfig, UcxTransport};
use baton_proto::internal::AttachRequest;
use baton_proto::internal::kv_staging_client::KvStagingClient;

use super::*;

/// UCX's transports: as it finds them, which is by way of the kernel's copy inside one machine,
/// and TCP, as between two.
pub const TLS: [Option<&str>; 2] = [None, Some("tcp")];

async fn started(tls: Option<&str>) -> Ucx {
    let config = UcxConfig {
        library: std::env::var("BATON_TEST_UCX_LIBRARY").ok(),
        tls: tls.map(str::to_owned),
        ..UcxConfig::default()
    };
    let ucx = Ucx::start(config, &FrameMemory::heap()).unwrap();
    ucx.ready().await.unwrap_or_else(|why| panic!("these tests need UCX (libucx0): {why}"));
    ucx
}

pub async fn net(tls: Option<&str>) -> Net {
    let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listening.local_addr().unwrap());
    let incoming = serve(listening, Some((started(tls).await, Fallback::Allowed)));
    let transport = Box::new(fallback_transport(started(tls).await, Fallback::Forbidden));
    Net { transport, address, incoming }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_handed_over_by_ucx() {
    for tls in TLS {
        hand_over(net(tls).await).await;
    }
}

/// One link's slots, shared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_are_handed_over_by_ucx_side_by_side() {
    for tls in TLS {
        let mut net = net(tls).await;
        let clock = Clock::start();
        let (mut sendings, mut receivings) = (Vec::new(), Vec::new());
        for id in 0..4 {
            let (receiver, grant) = granted_as(clock, id);
            let stream = net.transport.connect(&net.address).await.unwrap();
            sendings.push(start(grant, stream, clock, TOKENS / CHUNK_TOKENS));
            receivings.push(receiver);
        }
        let mut taking = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let mut stream = net.incoming.recv().await.unwrap();
            let (id, first) = read_open(&mut stream, Duration::from_secs(1)).await.unwrap();
            let named = |receiver: &Receiver| receiver.current_grant().transfer_id == id;
            let at = receivings.iter().position(named).unwrap();
            let mut receiver = receivings.swap_remove(at);
            taking.spawn(async move {
                let memory = Memory::default();
                let never = pending();
                let outcome =
                    receive::drive(&mut receiver, first, stream, &memory, clock, never).await;
                assert_eq!(outcome, ReceiverOutcome::Committed);
                check(&memory);
            });
        }
        taking.join_all().await;
        for (sending, _cancel) in sendings {
            sending.await.unwrap().unwrap();
        }
    }
}

fn fallback_transport(ucx: Ucx, fallback: Fallback) -> UcxTransport {
    let (node, incarnation) = (NodeId::new("prefill"), Incarnation(4));
    UcxTransport::new(GrpcTransport::new(), ucx, node, incarnation, fallback)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_without_ucx_gets_grpc_and_it_is_told() {
    let mut net = grpc().await;
    let transport = fallback_transport(started(None).await, Fallback::Allowed);
    let stream = transport.connect(&net.address).await.unwrap();
    let why = stream.carried.fallback().expect("it says why").to_owned();
    assert!(why.contains("gRPC only"), "{why}");
    assert_eq!(transport.fallbacks(), [("peer", 1)]);
    drop((stream, net.incoming.recv().await));
    hand_over(Net { transport: Box::new(transport), ..net }).await;

    let net = grpc().await;
    let transport = fallback_transport(started(None).await, Fallback::Forbidden);
    let error = transport.connect(&net.address).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    assert!(error.to_string().contains("gRPC is forbidden"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_ucx_starts_and_sends_over_grpc() {
    let library = Some("libucp-that-is-not-there.so".to_owned());
    let absent = Ucx::start(UcxConfig { library, ..UcxConfig::default() }, &FrameMemory::heap());
    let absent = absent.unwrap();
    let why = absent.ready().await.unwrap_err();
    assert!(why.contains("libucp-that-is-not-there.so"), "{why}");
    // Both ends: one that offers UCX, one that lacks it.
    let mut net = net(None).await;
    net.transport = Box::new(fallback_transport(absent.clone(), Fallback::Allowed));
    hand_over(net).await;
    let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listening.local_addr().unwrap());
    let incoming = serve(listening, Some((absent, Fallback::Allowed)));
    let transport = fallback_transport(started(None).await, Fallback::Allowed);
    hand_over(Net { transport: Box::new(transport), address, incoming }).await;
}

/// Staging memory is the peer's for as long as it sends, and goes when it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn staging_memory_returns_to_zero() {
    for tls in TLS {
        let receiving = started(tls).await;
        let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listening.local_addr().unwrap());
        let incoming = serve(listening, Some((receiving.clone(), Fallback::Allowed)));
        let registered = || receiving.counters().registered_bytes.load(Ordering::Relaxed);
        let sending = started(tls).await;
        let transport = Box::new(fallback_transport(sending.clone(), Fallback::Forbidden));
        let mut net = Net { transport, address, incoming };
        let clock = Clock::start();
        let (mut receiver, grant) = granted(clock);
        let stream = net.transport.connect(&net.address).await.unwrap();
        assert!(registered() > 0);
        let (running, _cancel) = start(grant, stream, clock, 1);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            running.abort();
        });
        let memory = Memory::default();
        let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
        assert_eq!(outcome, ReceiverOutcome::Failed(TransferError::Closed));
        assert!(sending.counters().sent_bytes.load(Ordering::Relaxed) > 0);
        let freed = async {
            while registered() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(4), freed).await.expect("memory comes back");
        // Whoever sends again is attached again.
        let (mut receiver, grant) = granted(clock);
        let stream = net.transport.connect(&net.address).await.unwrap();
        let (running, _cancel) = start(grant, stream, clock, TOKENS / CHUNK_TOKENS);
        let memory = Memory::default();
        let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
        assert_eq!(outcome, ReceiverOutcome::Committed);
        running.await.unwrap().unwrap();
        check(&memory);
    }
}

/// Versions that differ must not see one another's addresses: UCX would end the process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_version_of_ucx_is_refused() {
    let receiving = started(None).await;
    let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listening.local_addr().unwrap());
    let _incoming = serve(listening, Some((receiving, Fallback::Allowed)));
    let mut client = KvStagingClient::connect(address).await.unwrap();
    // Of a worker that is nowhere: "BUCX", CRC-32C of "address", "address".
    let sealed = [&b"BUCX"[..], &0xbf20_96a4_u32.to_le_bytes(), b"address"].concat();
    for version in ["1.99.0", "2.13.1", "", "1"] {
        let request = AttachRequest {
            node_id: "prefill".into(),
            incarnation: 1,
            worker_address: sealed.clone().into(),
            ucx_version: version.into(),
        };
        let status = client.attach(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains("do not understand"), "{status:?}");
    }
}

/// Where the receiver wants UCX alone, no sender's settings bring it KV over gRPC.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_forbids_grpc_takes_no_frame_of_it() {
    let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listening.local_addr().unwrap());
    let incoming = serve(listening, Some((started(None).await, Fallback::Forbidden)));
    let error = GrpcTransport::new().connect(&address).await.unwrap_err();
    assert!(error.to_string().contains("over UCX only"), "{error}");
    let transport = fallback_transport(started(None).await, Fallback::Allowed);
    hand_over(Net { transport: Box::new(transport), address, incoming }).await;
}

/// It is given up in its time; the others wait for theirs alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_does_not_answer_keeps_nobody_from_another() {
    // Nobody accepts: the kernel alone answers.
    let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("http://{}", listening.local_addr().unwrap());
    let net = net(None).await;
    let silence = net.transport.connect(&silent);
    let other = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        net.transport.connect(&net.address).await
    };
    let began = Instant::now();
    let (silence, other) =
        tokio::join!(async { (silence.await.map(drop), began.elapsed()) }, async {
            (other.await.map(drop), began.elapsed())
        });
    assert!(silence.0.is_err() && other.0.is_ok(), "{silence:?} {other:?}");
    assert!(other.1 < silence.1, "{other:?} waited for {silence:?}");
}
