// Our copy of the verbs ABI against the installed header, where there is one.
#include "xla_ffi/transport/rdma/abi.h"

#include <gtest/gtest.h>

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

namespace hetccl::transport::rdma::abi {
namespace {

#define SAME_FIELD(ours, theirs, field)                              \
  static_assert(offsetof(ours, field) == offsetof(theirs, field) &&  \
                    sizeof(reinterpret_cast<ours*>(1)->field) ==     \
                        sizeof(reinterpret_cast<theirs*>(1)->field), \
                #ours "." #field)
#define SAME_VALUE(ours, theirs) \
  static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #ours)
#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #ours)

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GidEntry, ibv_gid_entry);
SAME_FIELD(GidEntry, ibv_gid_entry, gid_index);
SAME_FIELD(GidEntry, ibv_gid_entry, port_num);
SAME_FIELD(GidEntry, ibv_gid_entry, gid_type);
SAME_FIELD(GidEntry, ibv_gid_entry, ndev_ifindex);
SAME_VALUE(kGidRoceV1, IBV_GID_TYPE_ROCE_V1);
SAME_VALUE(kGidRoceV2, IBV_GID_TYPE_ROCE_V2);

SAME_FIELD(Device, ibv_device, transport_type);
SAME_FIELD(Device, ibv_device, name);
SAME_VALUE(kTransportIb, IBV_TRANSPORT_IB);
SAME_VALUE(kTransportIwarp, IBV_TRANSPORT_IWARP);

SAME_SIZE(PortAttr, ibv_port_attr);
SAME_FIELD(PortAttr, ibv_port_attr, state);
SAME_FIELD(PortAttr, ibv_port_attr, active_mtu);
SAME_FIELD(PortAttr, ibv_port_attr, gid_tbl_len);
SAME_FIELD(PortAttr, ibv_port_attr, lid);
SAME_FIELD(PortAttr, ibv_port_attr, link_layer);
SAME_VALUE(kPortDown, IBV_PORT_DOWN);
SAME_VALUE(kPortInit, IBV_PORT_INIT);
SAME_VALUE(kPortArmed, IBV_PORT_ARMED);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kLinkInfiniBand, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kLinkEthernet, IBV_LINK_LAYER_ETHERNET);

SAME_FIELD(Pd, ibv_pd, context);
SAME_SIZE(Mr, ibv_mr);
SAME_FIELD(Mr, ibv_mr, addr);
SAME_FIELD(Mr, ibv_mr, length);
SAME_FIELD(Mr, ibv_mr, lkey);
SAME_FIELD(Mr, ibv_mr, rkey);
SAME_FIELD(CompChannel, ibv_comp_channel, fd);
SAME_FIELD(Cq, ibv_cq, context);
SAME_FIELD(Qp, ibv_qp, context);
SAME_FIELD(Qp, ibv_qp, qp_num);
SAME_VALUE(kQpRc, IBV_QPT_RC);
SAME_VALUE(kQpInit, IBV_QPS_INIT);
SAME_VALUE(kQpRtr, IBV_QPS_RTR);
SAME_VALUE(kQpRts, IBV_QPS_RTS);
SAME_VALUE(kQpError, IBV_QPS_ERR);

SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, send_cq);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, recv_cq);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, cap);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME_FIELD(QpCap, ibv_qp_cap, max_inline_data);

SAME_SIZE(QpAttr, ibv_qp_attr);
SAME_FIELD(QpAttr, ibv_qp_attr, path_mtu);
SAME_FIELD(QpAttr, ibv_qp_attr, rq_psn);
SAME_FIELD(QpAttr, ibv_qp_attr, sq_psn);
SAME_FIELD(QpAttr, ibv_qp_attr, dest_qp_num);
SAME_FIELD(QpAttr, ibv_qp_attr, qp_access_flags);
SAME_FIELD(QpAttr, ibv_qp_attr, ah_attr);
SAME_FIELD(QpAttr, ibv_qp_attr, min_rnr_timer);
SAME_FIELD(QpAttr, ibv_qp_attr, port_num);
SAME_FIELD(QpAttr, ibv_qp_attr, timeout);
SAME_FIELD(QpAttr, ibv_qp_attr, retry_cnt);
SAME_FIELD(QpAttr, ibv_qp_attr, rnr_retry);
SAME_SIZE(AhAttr, ibv_ah_attr);
SAME_FIELD(AhAttr, ibv_ah_attr, dlid);
SAME_FIELD(AhAttr, ibv_ah_attr, is_global);
SAME_FIELD(AhAttr, ibv_ah_attr, port_num);
SAME_FIELD(GlobalRoute, ibv_global_route, sgid_index);
SAME_FIELD(GlobalRoute, ibv_global_route, hop_limit);
SAME_FIELD(GlobalRoute, ibv_global_route, traffic_class);
SAME_VALUE(kAttrState, IBV_QP_STATE);
SAME_VALUE(kAttrAccessFlags, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kAttrPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kAttrPort, IBV_QP_PORT);
SAME_VALUE(kAttrAv, IBV_QP_AV);
SAME_VALUE(kAttrPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kAttrTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kAttrRetryCount, IBV_QP_RETRY_CNT);
SAME_VALUE(kAttrRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kAttrRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kAttrMaxRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kAttrMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kAttrSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kAttrMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kAttrDestQpn, IBV_QP_DEST_QPN);
SAME_VALUE(kAccessLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kAccessRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kAccessOnDemand, IBV_ACCESS_ON_DEMAND);

SAME_SIZE(Sge, ibv_sge);
SAME_SIZE(SendWr, ibv_send_wr);
SAME_FIELD(SendWr, ibv_send_wr, sg_list);
SAME_FIELD(SendWr, ibv_send_wr, num_sge);
SAME_FIELD(SendWr, ibv_send_wr, opcode);
SAME_FIELD(SendWr, ibv_send_wr, send_flags);
SAME_FIELD(SendWr, ibv_send_wr, imm_data);
static_assert(offsetof(SendWr, rdma.remote_addr) == offsetof(ibv_send_wr, wr.rdma.remote_addr));
static_assert(offsetof(SendWr, rdma.rkey) == offsetof(ibv_send_wr, wr.rdma.rkey));
SAME_VALUE(kWrRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kWrRdmaWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kSendSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kSendInline, IBV_SEND_INLINE);
SAME_SIZE(RecvWr, ibv_recv_wr);
SAME_FIELD(RecvWr, ibv_recv_wr, num_sge);

SAME_SIZE(Wc, ibv_wc);
SAME_FIELD(Wc, ibv_wc, status);
SAME_FIELD(Wc, ibv_wc, opcode);
SAME_FIELD(Wc, ibv_wc, vendor_err);
SAME_FIELD(Wc, ibv_wc, byte_len);
SAME_FIELD(Wc, ibv_wc, imm_data);
SAME_VALUE(kWcRecvRdmaWithImm, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(kWcLocalLength, IBV_WC_LOC_LEN_ERR);
SAME_VALUE(kWcLocalQpOperation, IBV_WC_LOC_QP_OP_ERR);
SAME_VALUE(kWcLocalProtection, IBV_WC_LOC_PROT_ERR);
SAME_VALUE(kWcFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kWcBadResponse, IBV_WC_BAD_RESP_ERR);
SAME_VALUE(kWcLocalAccess, IBV_WC_LOC_ACCESS_ERR);
SAME_VALUE(kWcRemoteInvalidRequest, IBV_WC_REM_INV_REQ_ERR);
SAME_VALUE(kWcRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(kWcRemoteOperation, IBV_WC_REM_OP_ERR);
SAME_VALUE(kWcRetryExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(kWcRnrRetryExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(kWcRemoteAborted, IBV_WC_REM_ABORT_ERR);
SAME_VALUE(kWcFatal, IBV_WC_FATAL_ERR);
SAME_VALUE(kWcResponseTimeout, IBV_WC_RESP_TIMEOUT_ERR);

SAME_SIZE(ContextOps, ibv_context_ops);
SAME_FIELD(ContextOps, ibv_context_ops, poll_cq);
SAME_FIELD(ContextOps, ibv_context_ops, req_notify_cq);
SAME_FIELD(ContextOps, ibv_context_ops, post_send);
SAME_FIELD(ContextOps, ibv_context_ops, post_recv);
SAME_FIELD(Context, ibv_context, ops);
SAME_SIZE(Context, ibv_context);
SAME_FIELD(Context, ibv_context, async_fd);
SAME_FIELD(Context, ibv_context, abi_compat);

SAME_VALUE(kOdpSupport, IBV_ODP_SUPPORT);
SAME_VALUE(kOdpSupportWrite, IBV_ODP_SUPPORT_WRITE);
SAME_FIELD(DeviceAttrEx, ibv_device_attr_ex, comp_mask);
SAME_FIELD(DeviceAttrEx, ibv_device_attr_ex, odp_caps);
SAME_FIELD(OdpCaps, ibv_odp_caps, general_caps);
static_assert(offsetof(OdpCaps, rc_odp_caps) ==
              offsetof(ibv_odp_caps, per_transport_caps.rc_odp_caps));
static_assert(sizeof(DeviceAttrEx) <= sizeof(ibv_device_attr_ex));
static_assert(sizeof(ExtendedContext) ==
              sizeof(verbs_context) - offsetof(verbs_context, query_device_ex));
static_assert(offsetof(ExtendedContext, size) ==
              offsetof(verbs_context, sz) - offsetof(verbs_context, query_device_ex));
static_assert(offsetof(ExtendedContext, context) ==
              offsetof(verbs_context, context) - offsetof(verbs_context, query_device_ex));

TEST(VerbsAbi, IsThatOfTheInstalledHeader) {
  EXPECT_EQ(reinterpret_cast<void*>(kExtended), __VERBS_ABI_IS_EXTENDED);
}

}  // namespace
}  // namespace hetccl::transport::rdma::abi

#else

TEST(VerbsAbi, IsThatOfTheInstalledHeader) {
  GTEST_SKIP() << "infiniband/verbs.h is not installed (Debian: libibverbs-dev)";
}

#endif
