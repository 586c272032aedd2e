// The part of the verbs interface that this transport uses, so that building needs no headers of
// rdma-core and running finds the library where there is one.
//
// Layouts and numbers are those of libibverbs' stable ABI, symbol versions IBVERBS_1.1 and later:
// rdma-core promises (Documentation/versioning.md) that programs built against it keep running.
// abi_test.cc compares every field that is used with the installed header where there is one.
// Fields that nothing here touches are named `unused` or left away at a struct's end, if the
// library and not the caller allocates it.
#ifndef XLA_FFI_TRANSPORT_RDMA_ABI_H_
#define XLA_FFI_TRANSPORT_RDMA_ABI_H_

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace hetccl::transport::rdma::abi {

union Gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix;
    uint64_t interface_id;
  } global;
};

struct GidEntry {
  Gid gid;
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type;
  uint32_t ndev_ifindex;
};
enum GidType : uint32_t { kGidIb = 0, kGidRoceV1 = 1, kGidRoceV2 = 2 };

// The library allocates it; `name` is what identifies a device everywhere.
struct Device {
  void* unused[2];
  int node_type;
  int transport_type;
  char name[64];
};
enum TransportType : int { kTransportIb = 0, kTransportIwarp = 1 };

enum PortState : int { kPortDown = 1, kPortInit = 2, kPortArmed = 3, kPortActive = 4 };
enum LinkLayer : uint8_t { kLinkInfiniBand = 1, kLinkEthernet = 2 };

struct PortAttr {
  int state;
  int max_mtu;
  int active_mtu;  // 1: 256 bytes, ... 5: 4096 bytes
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t bad_pkey_cntr;
  uint32_t qkey_viol_cntr;
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t sm_lid;
  uint8_t lmc;
  uint8_t max_vl_num;
  uint8_t sm_sl;
  uint8_t subnet_timeout;
  uint8_t init_type_reply;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};

struct Context;
struct Cq;
struct Qp;
struct Srq;

struct Pd {
  Context* context;
  uint32_t handle;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct CompChannel {
  Context* context;
  int fd;
  int refcnt;
};

struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
};

enum QpType : int { kQpRc = 2 };
enum QpState : int { kQpInit = 1, kQpRtr = 2, kQpRts = 3, kQpError = 6 };

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  uint32_t handle;
  uint32_t qp_num;
};

struct QpCap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};

struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  QpCap cap;
  int qp_type;
  int sq_sig_all;
};

struct GlobalRoute {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};

struct QpAttr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint32_t rate_limit;
};
enum QpAttrMask : int {
  kAttrState = 1 << 0,
  kAttrAccessFlags = 1 << 3,
  kAttrPkeyIndex = 1 << 4,
  kAttrPort = 1 << 5,
  kAttrAv = 1 << 7,
  kAttrPathMtu = 1 << 8,
  kAttrTimeout = 1 << 9,
  kAttrRetryCount = 1 << 10,
  kAttrRnrRetry = 1 << 11,
  kAttrRqPsn = 1 << 12,
  kAttrMaxRdAtomic = 1 << 13,
  kAttrMinRnrTimer = 1 << 15,
  kAttrSqPsn = 1 << 16,
  kAttrMaxDestRdAtomic = 1 << 17,
  kAttrDestQpn = 1 << 20,
};

enum Access : int { kAccessLocalWrite = 1, kAccessRemoteWrite = 2, kAccessOnDemand = 1 << 6 };

struct Sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

enum WrOpcode : int { kWrRdmaWrite = 0, kWrRdmaWriteWithImm = 1 };
enum SendFlags : unsigned { kSendSignaled = 1 << 1, kSendInline = 1 << 3 };

struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;  // big endian
  struct {
    uint64_t remote_addr;
    uint32_t rkey;
    uint64_t unused[2];
  } rdma;
  uint64_t unused[7];
};

struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

enum WcStatus : int {
  kWcSuccess = 0,
  kWcLocalLength = 1,
  kWcLocalQpOperation = 2,
  kWcLocalProtection = 4,
  kWcFlushed = 5,
  kWcBadResponse = 7,
  kWcLocalAccess = 8,
  kWcRemoteInvalidRequest = 9,
  kWcRemoteAccess = 10,
  kWcRemoteOperation = 11,
  kWcRetryExceeded = 12,
  kWcRnrRetryExceeded = 13,
  kWcRemoteAborted = 16,
  kWcFatal = 19,
  kWcResponseTimeout = 20,
};
enum WcOpcode : int { kWcRecvRdmaWithImm = 129 };

struct Wc {
  uint64_t wr_id;
  int status;
  int opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;  // big endian
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};

// The fast path is not in the library's symbol table: verbs.h calls it through the context, whose
// entries the NIC's provider sets.
struct ContextOps {
  void* unused_before[11];
  int (*poll_cq)(Cq*, int, Wc*);
  int (*req_notify_cq)(Cq*, int solicited_only);
  void* unused_between[12];
  int (*post_send)(Qp*, SendWr*, SendWr** bad);
  int (*post_recv)(Qp*, RecvWr*, RecvWr** bad);
  void* unused_after[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;  // kExtended: the context is the end of an ExtendedContext
};
inline constexpr uintptr_t kExtended = ~uintptr_t{0};

enum OdpGeneralCaps : uint64_t { kOdpSupport = 1 << 0 };
enum OdpTransportCaps : uint32_t { kOdpSupportWrite = 1 << 2 };

struct OdpCaps {
  uint64_t general_caps;
  uint32_t rc_odp_caps;
  uint32_t uc_odp_caps;
  uint32_t ud_odp_caps;
};

struct DeviceAttrEx {
  uint64_t unused_before[29];
  uint32_t comp_mask;
  OdpCaps odp_caps;
  uint64_t unused_after[17];
};

// The struct that the library allocates around a context grows at its front, so this one begins
// with the only entry that is used. A library or provider whose `size` is less lacks that entry.
struct ExtendedContext {
  int (*query_device_ex)(Context*, const void* input, DeviceAttrEx*, size_t attr_size);
  void* unused[11];
  size_t size;
  Context context;
};

}  // namespace hetccl::transport::rdma::abi

#endif  // XLA_FFI_TRANSPORT_RDMA_ABI_H_
